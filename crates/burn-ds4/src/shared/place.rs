//! Where a model runs.

use std::fmt;

use burn_ds4_ops::device::DeviceSpec;
use clap::Args;

use super::Dtype;
use super::devices::DeviceArgs;

/// Options that say where a model runs.
#[derive(Clone, Debug, Args)]
pub struct PlaceArgs {
    #[command(flatten)]
    devices: DeviceArgs,
    /// Dtype of the activations [default: bf16 with CUDA, else f32].
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
}

/// One device or several, and the dtype of the activations there.
#[derive(Clone, Debug)]
pub struct Place {
    /// The devices.
    pub devices: DeviceArgs,
    /// The dtype.
    pub dtype: Dtype,
}

impl PlaceArgs {
    /// What the options say, and else the best that is compiled in and present.
    pub fn place(&self) -> Place {
        let devices = self.devices.clone().or(DeviceSpec::best);
        let dtype = self.dtype.unwrap_or(match devices.first() {
            DeviceSpec::Cuda(_) => Dtype::Bf16,
            _ => Dtype::F32,
        });
        Place { devices, dtype }
    }
}

impl Place {
    /// The first of the devices.
    pub fn device(&self) -> DeviceSpec {
        self.devices.first()
    }

    /// The name of the dtype.
    pub fn dtype_name(&self) -> String {
        format!("{:?}", self.dtype).to_lowercase()
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {}", self.devices, self.dtype_name())
    }
}
