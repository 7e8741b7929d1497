//! Where a model runs.

use std::fmt;

use burn_ds4_ops::device::DeviceSpec;
use clap::Args;

use super::Dtype;

/// Options that say where a model runs.
#[derive(Clone, Debug, Args)]
pub struct PlaceArgs {
    /// Device: flex (CPU), wgpu, cuda or cuda:INDEX [default: the best that is there].
    #[arg(long)]
    device: Option<DeviceSpec>,
    /// Dtype of the activations [default: bf16 with CUDA, else f32].
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
}

/// A device, and the dtype of the activations there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The device.
    pub device: DeviceSpec,
    /// The dtype.
    pub dtype: Dtype,
}

impl PlaceArgs {
    /// What the options say, and else the best that is compiled in and present.
    pub fn place(&self) -> Place {
        let device = self.device.unwrap_or_else(DeviceSpec::best);
        let dtype = self.dtype.unwrap_or(match device {
            DeviceSpec::Cuda(_) => Dtype::Bf16,
            _ => Dtype::F32,
        });
        Place { device, dtype }
    }
}

impl Place {
    /// The name of the dtype.
    pub fn dtype_name(self) -> String {
        format!("{:?}", self.dtype).to_lowercase()
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {}", self.device, self.dtype_name())
    }
}
