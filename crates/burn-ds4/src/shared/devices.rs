//! Where a model runs.

use std::fmt;

use burn_ds4_ops::device::{DeviceError, DeviceSpec};
use clap::{Args, ValueEnum};
use ds4_model::parallel::Parallel;
use ds4_model::placement::{DEFAULT_CONTEXT, Devices, PlacementError};

/// Why a model cannot run there.
#[derive(Debug, thiserror::Error)]
pub enum DeviceArgsError {
    /// A device is not there.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The devices do not go together.
    #[error(transparent)]
    Placement(#[from] PlacementError),
}

/// How several devices share a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ParallelArg {
    /// Parts for one text at a time, or on two devices, if the devices can write to each other's
    /// memory and each can have an equal part; layers otherwise.
    #[default]
    Auto,
    /// Each has some of the layers.
    Layers,
    /// Each has a part of every layer: one text takes less time.
    Tensor,
}

impl From<ParallelArg> for Parallel {
    fn from(arg: ParallelArg) -> Self {
        match arg {
            ParallelArg::Auto => Self::Auto,
            ParallelArg::Layers => Self::Layers,
            ParallelArg::Tensor => Self::Tensor,
        }
    }
}

/// Options of how several devices share a model. The argument that says which is `device`.
#[derive(Clone, Debug, Args)]
pub struct SharingArgs {
    /// Layers of each device, with commas between them [default: as many as balance the memory].
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "LAYERS",
        requires = "device"
    )]
    pub split: Option<Vec<usize>>,
    /// What several devices share: whole layers, or parts of every layer.
    #[arg(long, value_enum, default_value_t, requires = "device")]
    pub parallel: ParallelArg,
}

/// Options of where a model runs.
#[derive(Clone, Debug, Args)]
pub struct DeviceArgs {
    /// Device: flex (CPU), wgpu, cuda or cuda:INDEX. Several, with commas between them, share the
    /// model: cuda:0,cuda:1 [default: flex; generate and serve: the best that is there].
    #[arg(long, value_delimiter = ',', value_name = "DEVICE")]
    device: Vec<DeviceSpec>,
    #[command(flatten)]
    sharing: SharingArgs,
}

impl DeviceArgs {
    /// Takes this device where none is given.
    pub fn or(self, default: impl FnOnce() -> DeviceSpec) -> Self {
        match self.device.is_empty() {
            true => Self {
                device: vec![default()],
                ..self
            },
            false => self,
        }
    }

    /// The first of them. The others are of its kind, or as slow at most.
    pub fn first(&self) -> DeviceSpec {
        self.device.first().copied().unwrap_or_default()
    }

    /// The devices, for up to so many texts at a time, of so many positions together, or as many
    /// as usual.
    pub fn init(&self, texts: usize, positions: Option<usize>) -> Result<Devices, DeviceArgsError> {
        let specs = match &self.device[..] {
            [] => &[DeviceSpec::default()],
            specs => specs,
        };
        if let DeviceSpec::Cuda(_) = specs[0] {
            super::kernels::begin();
        }
        let devices = specs
            .iter()
            .map(|spec| Ok((spec.to_string(), spec.init()?)));
        let devices = devices.collect::<Result<_, DeviceError>>()?;
        let SharingArgs { split, parallel } = self.sharing.clone();
        let devices = Devices::new(devices)?.with_split(split);
        let devices = devices.with_parallel(match parallel {
            // On two devices, parts are faster for 1, 16 and 64 texts. More have not been measured
            // with several texts, which keep all of them busy with whole layers.
            ParallelArg::Auto if texts > 1 && specs.len() > 2 => Parallel::Layers,
            own => own.into(),
        });
        Ok(devices.with_context(positions.unwrap_or(DEFAULT_CONTEXT)))
    }
}

impl fmt::Display for DeviceArgs {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.first())?;
        let others = self.device.iter().skip(1);
        others
            .into_iter()
            .try_for_each(|device| write!(formatter, ",{device}"))
    }
}
