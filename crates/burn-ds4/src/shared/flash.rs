//! The clustered output head: read from next to the checkpoint, or built.

use std::error::Error;
use std::path::Path;

use burn_ds4_ops::flash_head::{BuildOptions, FlashHead};
use clap::Args;
use ds4_model::flash_head::{DEFAULT_CAPACITY, FLASH_HEAD_FILE, FlashHeadFile, ProbedHead};
use ds4_model::model::Model;
use indicatif::{ProgressBar, ProgressStyle};

/// Options of the clustered head.
#[derive(Debug, Args)]
pub struct FlashArgs {
    /// Clusters of the flash head to probe; all of them find what the dense head does [default: a
    /// sixteenth of them].
    #[arg(long, value_name = "P")]
    pub probes: Option<usize>,
    /// Keeps a flash head that had to be built in flash_head.safetensors, next to the checkpoint.
    #[arg(long)]
    pub save_head: bool,
}

impl FlashArgs {
    /// Refuses options of a head that is not used; `used_by` names the options that would use it.
    pub fn check(&self, used: bool, used_by: &str) -> Result<(), String> {
        let options = [
            ("--probes", self.probes.is_some()),
            ("--save-head", self.save_head),
        ];
        match options.iter().find(|(_, given)| *given && !used) {
            Some((option, _)) => Err(format!("{option} needs {used_by}")),
            None => Ok(()),
        }
    }

    /// The head of a model that was loaded from `directory`.
    pub fn head(&self, directory: &Path, model: &Model) -> Result<ProbedHead, Box<dyn Error>> {
        let path = directory.join(FLASH_HEAD_FILE);
        let head = if path.try_exists()? {
            FlashHeadFile::open(&path)?.head(model.output.val())?
        } else {
            let clusters = model.config().vocab_size.div_ceil(DEFAULT_CAPACITY);
            // Check this before the clusters are built, which may take minutes.
            if let Some(probes) = self.probes {
                ProbedHead::check_probes(probes, clusters)?;
            }
            let options = BuildOptions {
                // Without it a text might not end.
                special_tokens: vec![model.config().eos_token_id],
                ..BuildOptions::default()
            };
            let head = build(model, clusters, &options)?;
            if self.save_head {
                FlashHeadFile::save(&path, &head, Some(options.seed))?;
            }
            head
        };
        let default = ProbedHead::default_probes(head.clusters());
        Ok(ProbedHead::new(head, self.probes.unwrap_or(default))?)
    }
}

fn build(
    model: &Model,
    clusters: usize,
    options: &BuildOptions,
) -> Result<FlashHead, Box<dyn Error>> {
    let bar = ProgressBar::new(options.iterations as u64).with_style(ProgressStyle::with_template(
        "Clustering the output head [{bar:30}] {pos}/{len} at most{msg}",
    )?);
    bar.tick();
    let head = FlashHead::build(model.output.val(), clusters, options, |progress| {
        bar.set_message(format!(", {} tokens moved", progress.moved));
        bar.set_position(progress.iteration as u64);
    });
    bar.finish_and_clear();
    Ok(head?)
}
