//! What is timed: a checkpoint, or layers with random weights.

use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;

use clap::{Args, ValueEnum};
use ds4_model::checkpoint::Checkpoint;
use ds4_model::model::Model;

use crate::bench::flash;
use crate::shared::devices::DeviceArgs;
use crate::shared::{ActivationsArg, Dtype, load_options, shipped_checkpoint};

/// Options of a model, and of where it runs.
#[derive(Debug, Args)]
pub struct ModelArgs {
    /// What to run.
    #[arg(long = "model", value_name = "MODEL", value_enum, default_value_t = Which::Tiny)]
    pub which: Which,
    /// Where it runs.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Dtype of the activations.
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    pub dtype: Dtype,
    /// Directory of the checkpoint, for `tiny`.
    #[arg(long, default_value_os_t = shipped_checkpoint())]
    pub checkpoint: PathBuf,
    /// First layers of V4-Flash, for `flash`; half of them are timed, too.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=43))]
    layers: u32,
    /// What widths and numbers of heads are divided by, 1, 2, 4 or 8, for `flash`: to try it where
    /// there is little memory or no GPU.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=8))]
    shrink: u32,
    /// Routed experts of a layer, for `flash`; fewer of them take less memory.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(6..))]
    experts: u32,
    /// Size of the vocabulary, for `flash`.
    #[arg(long, default_value_t = 129_280, value_parser = clap::value_parser!(u32).range(1..))]
    vocabulary: u32,
    /// Fraction of drafts that are taken to be accepted, for `flash`.
    #[arg(long, default_value_t = 0.85, value_parser = fraction)]
    pub acceptance: f64,
    /// Drafts with the DSpark drafter of V4-Flash-0731 in place of the MTP layer, for `flash`.
    #[arg(long)]
    dspark: bool,
    /// What products by packed weights do to their other operand, for `flash`.
    #[arg(long, value_enum, default_value_t)]
    pub activations: ActivationsArg,
}

/// Reads a number between 0 and 1.
pub fn fraction(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok();
    let number = number.filter(|number| (0.0..=1.0).contains(number));
    number.ok_or_else(|| "not between 0 and 1".to_owned())
}

/// Reads a number above 0.
pub fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok();
    let number = number.filter(|number| number.is_finite() && *number > 0.0);
    number.ok_or_else(|| "not a number above 0".to_owned())
}

/// A model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Which {
    /// A checkpoint, by default the trained one that comes with the repository.
    Tiny,
    /// The first layers of V4-Flash and what drafts, with random weights.
    Flash,
}

impl ModelArgs {
    /// What tables call it.
    pub fn name(&self) -> String {
        format!("{:?} in {:?} on {}", self.which, self.dtype, self.device).to_lowercase()
    }

    /// What a line of JSON calls it.
    pub fn json_name(&self) -> String {
        match self.which {
            Which::Flash => "flash".to_owned(),
            Which::Tiny => {
                let name = self.checkpoint.file_name().unwrap_or_default();
                name.to_string_lossy().into_owned()
            }
        }
    }

    /// The model, for so many texts at a time, of so many positions together.
    ///
    /// # Errors
    ///
    /// If options do not go together, the checkpoint cannot be loaded, or the device fails.
    pub fn make(&self, texts: usize, positions: Option<usize>) -> Result<Model, Box<dyn Error>> {
        match self.which {
            Which::Tiny => {
                let devices = self.device.init(texts, positions)?;
                let checkpoint = Checkpoint::open(&self.checkpoint)?;
                let options = load_options(self.device.first(), self.dtype, true);
                Ok(checkpoint.load(&options, &devices)?)
            }
            Which::Flash => self.random(texts, positions),
        }
    }

    fn random(&self, texts: usize, positions: Option<usize>) -> Result<Model, Box<dyn Error>> {
        let devices = self.device.init(texts, positions)?;
        let start = Instant::now();
        let [layers, experts, vocabulary, shrink] =
            [self.layers, self.experts, self.vocabulary, self.shrink].map(|own| own as usize);
        if !shrink.is_power_of_two() {
            return Err(format!("--shrink must be 1, 2, 4 or 8, not {shrink}").into());
        }
        let config = flash::config(layers, experts, vocabulary, shrink);
        let (config, drafter) = match self.dspark {
            true if layers < 6 => return Err("--dspark needs --layers 6 or more".into()),
            true => (flash::with_dspark(config), "DSpark"),
            false => (config, "MTP"),
        };
        config.validate()?;
        for device in devices.devices() {
            device.seed(0);
        }
        let model = config.init_packed_on(self.dtype.into(), self.activations.into(), &devices)?;
        let placed = model.placement.runs().iter();
        let placed = placed.map(|run| (run.layers.clone(), &run.device));
        let parts = model
            .parallel
            .iter()
            .flat_map(|parallel| parallel.devices());
        let parts = parts.map(|device| (0..layers, device));
        let whole = placed.filter(|_| model.parallel.is_none());
        for (layers, device) in whole.chain(parts) {
            device.sync()?;
            let usage = device.memory_pool_usage();
            let bytes = usage.map_or("an unknown number of".to_owned(), |usage| {
                usage.bytes_in_use.to_string()
            });
            println!("layers {layers:?} on {device:?}: {bytes} bytes in use");
        }
        println!(
            "{layers} layers and {drafter}, {experts} experts, weights made in {:.1} s",
            start.elapsed().as_secs_f64()
        );
        Ok(model)
    }
}
