//! Selects a device by name, and checks that it is present before using it.
//!
//! Burn creates a device lazily and panics on first use where the hardware is missing.
//! [`DeviceSpec::init`] checks first, by enumeration, which loads a driver if there is one and
//! creates no context. An adapter of wgpu is opened, to see whether it can run the operators.
//!
//! ```
//! use burn_ds4_ops::device::{DeviceError, DeviceSpec};
//!
//! let spec: DeviceSpec = "cuda:1".parse()?;
//! match spec.init() {
//!     Ok(device) => println!("running on {device:?}"),
//!     Err(error) => println!("{error}"),
//! }
//! # Ok::<(), DeviceError>(())
//! ```

#[cfg(feature = "wgpu")]
mod adapter;
#[cfg(all(feature = "cube", feature = "kernel-cache"))]
mod kernels;
mod launched;
mod memory;

use std::{fmt, str::FromStr};

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Int, Tensor};

use crate::kinds::Movable;

#[cfg(all(feature = "cube", feature = "kernel-cache"))]
pub use kernels::{KernelStoreError, keep_kernels, kernel_folder};
pub use launched::launched;
pub use memory::{check_tensors, copied, free_memory, may_allocate};

/// A device by name: `flex`, `wgpu`, `cuda`, `cuda:1`, `cpu`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DeviceSpec {
    /// Burn's pure-Rust CPU backend; present wherever it is compiled in.
    #[default]
    Flex,
    /// The best adapter that wgpu finds through Vulkan, Metal or DX12; OpenGL has not what the
    /// operators need. `CUBECL_WGPU_DEFAULT_DEVICE` overrides the choice among those of one API.
    Wgpu,
    /// The CUDA device of this index.
    Cuda(usize),
    /// CubeCL's CPU runtime.
    Cpu,
}

/// Why a device cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The name is not that of a device.
    #[error("unknown device `{0}`: expected flex, wgpu, cuda, cuda:INDEX or cpu")]
    Unknown(String),
    /// The build leaves the backend out.
    #[error("device `{device}` is not compiled in: build with `--features {feature}`")]
    NotCompiled {
        /// The device asked for.
        device: DeviceSpec,
        /// The cargo feature that enables it.
        feature: &'static str,
    },
    /// The machine has no such device.
    #[error("device `{device}` is not present: {reason}")]
    NotPresent {
        /// The device asked for.
        device: DeviceSpec,
        /// What was looked for and not found.
        reason: String,
    },
    /// The device is there, and has not what kernels need.
    #[error("device `{device}` cannot run the operators: {reason}")]
    Unfit {
        /// The device asked for.
        device: DeviceSpec,
        /// What it has, and what kernels need.
        reason: String,
    },
}

/// Checks that devices have taken the parameters of a module: the memory for them, and their data.
/// Waits until the devices have been given all of it, not until they have done what they were
/// given.
///
/// # Errors
///
/// What a device says, if it has not.
///
/// # Example
///
/// A parameter is a module, too.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::module::Param;
/// use burn::tensor::{Device, Tensor};
/// use burn_ds4_ops::device::check_module;
///
/// let weight = Param::from_tensor(Tensor::<2>::zeros([4, 4], &Device::flex()));
/// assert_eq!(check_module(&weight), Ok(()));
/// # }
/// ```
pub fn check_module(module: &impl Module) -> Result<(), String> {
    let mut parameters = Parameters {
        taken: Ok(()),
        synced: Vec::new(),
    };
    module.visit(&mut parameters);
    parameters.taken
}

/// Checks parameters, up to the first that a device has not taken.
struct Parameters {
    taken: Result<(), String>,
    /// Devices that do not tell of a tensor alone, and have done all that they were given.
    synced: Vec<Device>,
}

impl Parameters {
    fn check<const D: usize, K: Movable>(&mut self, value: impl FnOnce() -> Tensor<D, K>) {
        if self.taken.is_err() {
            return;
        }
        let tensor = value();
        #[cfg(all(feature = "cube", not(feature = "fusion")))]
        if let Some(own) = K::into_cube(tensor.clone()) {
            let taken = own.client.check([&own.handle]);
            self.taken = taken.map_err(|error| error.to_string());
            return;
        }
        let device = tensor.device();
        if !self.synced.contains(&device) {
            self.taken = device.sync().map_err(|error| error.to_string());
            self.synced.push(device);
        }
    }
}

impl ModuleVisitor for Parameters {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.check(|| param.val());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.check(|| param.val());
    }
}

/// Whether tensors of the device are in the host's own memory, so that reading them costs nothing
/// and never waits.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::Device;
/// use burn_ds4_ops::device::{DeviceSpec, is_host};
///
/// assert!(is_host(&Device::flex()));
/// if let Ok(gpu) = DeviceSpec::Wgpu.init() {
///     assert!(!is_host(&gpu));
/// }
/// # }
/// ```
pub fn is_host(device: &Device) -> bool {
    #[cfg(feature = "flex")]
    {
        *device == Device::flex()
    }
    #[cfg(not(feature = "flex"))]
    {
        let _ = device;
        false
    }
}

/// What kernels are compiled for on a device: `ptx_sm90` on an H200, `flex` where there are none.
///
/// Devices that compute the same bits have the same name here.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::Device;
/// use burn_ds4_ops::device::architecture;
///
/// assert_eq!(architecture(&Device::flex()), "flex");
/// # }
/// ```
pub fn architecture(device: &Device) -> String {
    #[cfg(feature = "cube")]
    if let Some(client) = crate::kinds::client(device) {
        return client.properties().identity.fingerprint.to_string();
    }
    let _ = device;
    DeviceSpec::Flex.to_string()
}

impl DeviceSpec {
    /// The device to take where none is named: the first CUDA device, a GPU through wgpu, or
    /// [`Flex`](Self::Flex), the first of them that is compiled in and present. An adapter of wgpu
    /// that is a software driver is none of them: Flex is faster.
    ///
    /// # Example
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn_ds4_ops::device::DeviceSpec;
    ///
    /// let best = DeviceSpec::best();
    /// assert!(best.init().is_ok());
    /// // CubeCL's CPU runtime is taken by its name only.
    /// assert_ne!(best, DeviceSpec::Cpu);
    /// # }
    /// ```
    pub fn best() -> Self {
        if Self::Cuda(0).init().is_ok() {
            return Self::Cuda(0);
        }
        #[cfg(feature = "wgpu")]
        if adapter::has_gpu() {
            return Self::Wgpu;
        }
        Self::Flex
    }

    /// The cargo feature that compiles this device in.
    ///
    /// # Example
    ///
    /// ```
    /// use burn_ds4_ops::device::DeviceSpec;
    ///
    /// assert_eq!(DeviceSpec::Cuda(1).feature(), "cuda");
    /// ```
    pub fn feature(self) -> &'static str {
        match self {
            Self::Flex => "flex",
            Self::Wgpu => "wgpu",
            Self::Cuda(_) => "cuda",
            Self::Cpu => "cpu",
        }
    }

    /// Returns the Burn device.
    ///
    /// # Errors
    ///
    /// [`DeviceError::NotCompiled`] where the build leaves the backend out,
    /// [`DeviceError::NotPresent`] where the machine has no such device, [`DeviceError::Unfit`]
    /// where kernels cannot run on it. It does not panic; the driver may still fail when the device
    /// is first used.
    ///
    /// # Example
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::Device;
    /// use burn_ds4_ops::device::DeviceSpec;
    ///
    /// assert_eq!(DeviceSpec::Flex.init(), Ok(Device::flex()));
    /// // Compiled in or not, there are not so many.
    /// assert!(DeviceSpec::Cuda(usize::MAX).init().is_err());
    /// # }
    /// ```
    pub fn init(self) -> Result<Device, DeviceError> {
        #[cfg(feature = "cube")]
        if self != Self::Flex {
            crate::caps::check_limits().map_err(|reason| DeviceError::Unfit {
                device: self,
                reason,
            })?;
        }
        match self {
            #[cfg(feature = "flex")]
            Self::Flex => Ok(Device::flex()),
            #[cfg(feature = "wgpu")]
            Self::Wgpu => adapter::find().map(|adapter| adapter.device),
            #[cfg(feature = "cuda-llvm")]
            Self::Cuda(index) => {
                let found = Device::enumerate(burn::tensor::DeviceType::Cuda).len();
                let reason = format!("the CUDA driver reports {found} device(s)");
                let device = (index < found).then(|| Device::cuda(index));
                let device = device.ok_or(DeviceError::NotPresent {
                    device: self,
                    reason,
                })?;
                // Without, CubeCL panics at each kernel on a thread of its own, and callers wait.
                #[cfg(feature = "cuda")]
                if cubecl::cuda::install::cuda_path().is_none() {
                    let reason = "kernels are compiled with headers of the CUDA toolkit: install \
                                  it, or set CUDA_PATH to its folder";
                    return Err(DeviceError::Unfit {
                        device: self,
                        reason: reason.into(),
                    });
                }
                Ok(device)
            }
            #[cfg(feature = "cpu")]
            Self::Cpu => Ok(Device::cpu()),
            #[allow(unreachable_patterns)]
            _ => Err(DeviceError::NotCompiled {
                device: self,
                feature: self.feature(),
            }),
        }
    }
}

impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cuda(index) => write!(f, "cuda:{index}"),
            other => f.write_str(other.feature()),
        }
    }
}

impl FromStr for DeviceSpec {
    type Err = DeviceError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let unknown = || DeviceError::Unknown(name.into());
        match name {
            "flex" => Ok(Self::Flex),
            "wgpu" => Ok(Self::Wgpu),
            "cuda" => Ok(Self::Cuda(0)),
            "cpu" => Ok(Self::Cpu),
            _ => {
                let index = name.strip_prefix("cuda:").ok_or_else(unknown)?;
                // `parse` alone would accept a leading plus sign.
                if !index.bytes().all(|byte| byte.is_ascii_digit()) {
                    return Err(unknown());
                }
                index.parse().map(Self::Cuda).map_err(|_| unknown())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_device_name_parses_and_prints_back() {
        for (name, spec, printed) in [
            ("flex", DeviceSpec::Flex, "flex"),
            ("wgpu", DeviceSpec::Wgpu, "wgpu"),
            ("cuda", DeviceSpec::Cuda(0), "cuda:0"),
            ("cuda:0", DeviceSpec::Cuda(0), "cuda:0"),
            ("cuda:17", DeviceSpec::Cuda(17), "cuda:17"),
            ("cpu", DeviceSpec::Cpu, "cpu"),
        ] {
            assert_eq!(name.parse(), Ok(spec));
            assert_eq!(spec.to_string(), printed);
        }
    }

    #[test]
    fn a_name_that_is_no_device_is_quoted_in_the_error() {
        for name in [
            "",
            "gpu",
            "CUDA",
            "cuda:",
            "cuda:-1",
            "cuda:+1",
            "cuda:x",
            "wgpu:0",
            "cuda:99999999999999999999999",
        ] {
            let error = name.parse::<DeviceSpec>().unwrap_err();
            assert_eq!(error, DeviceError::Unknown(name.into()));
            assert!(error.to_string().contains(&format!("`{name}`")), "{error}");
        }
    }

    #[test]
    fn a_cuda_index_that_does_not_exist_is_an_error_and_no_panic() {
        let error = DeviceSpec::Cuda(usize::MAX).init().unwrap_err();
        if cfg!(feature = "cuda-llvm") {
            assert!(matches!(error, DeviceError::NotPresent { .. }), "{error}");
        } else {
            assert_eq!(
                error.to_string(),
                format!(
                    "device `cuda:{}` is not compiled in: build with `--features cuda`",
                    usize::MAX
                )
            );
        }
    }

    #[test]
    #[cfg(feature = "flex")]
    fn flex_is_always_present() {
        assert_eq!(DeviceSpec::default().init(), Ok(Device::flex()));
    }

    #[test]
    #[cfg(feature = "flex")]
    fn the_best_device_is_present() {
        let best = DeviceSpec::best();
        assert!(best.init().is_ok(), "{best}");
        let has_others = cfg!(any(feature = "wgpu", feature = "cuda-llvm"));
        assert!(has_others || best == DeviceSpec::Flex, "{best}");
    }
}
