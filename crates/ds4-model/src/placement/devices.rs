//! The devices that a model is to be divided among.

use burn::tensor::Device;
use burn_ds4_ops::collective::{DeviceGroup, GroupRoute};
use burn_ds4_ops::device::architecture;

use super::bytes::{ModelBytes, PartBytes};
use super::error::PlacementError;
use super::plan::Plan;
use super::runs::{Placement, name};
use super::share::Parallel;
use crate::config::ModelConfig;

/// Positions of the one text whose cache counts where nobody says how long texts are.
pub const DEFAULT_CONTEXT: usize = 4096;

/// The devices that a model is to be divided among. A [`Device`] alone is one, too.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::Device;
/// use ds4_model::checkpoint::{Checkpoint, LoadOptions};
/// use ds4_model::placement::Devices;
///
/// let checkpoint = Checkpoint::open("../../assets/ds4-tiny".as_ref())?;
/// let devices = Devices::new(vec![("flex".into(), Device::flex())])?;
/// // What does not fit is refused before anything is loaded.
/// let error = checkpoint.load(&LoadOptions::default(), devices.with_memory(1 << 10));
/// assert!(error.unwrap_err().to_string().contains("flex"));
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Devices {
    devices: Vec<Device>,
    names: Vec<String>,
    memory: Vec<Option<usize>>,
    split: Option<Vec<usize>>,
    parallel: Parallel,
    context: usize,
}

impl From<&Device> for Devices {
    fn from(device: &Device) -> Self {
        Self {
            devices: vec![device.clone()],
            names: vec![name(device)],
            memory: vec![None],
            split: None,
            parallel: Parallel::default(),
            context: DEFAULT_CONTEXT,
        }
    }
}

impl From<&Devices> for Devices {
    fn from(devices: &Devices) -> Self {
        devices.clone()
    }
}

impl Devices {
    /// Devices, each with the name that errors give it.
    ///
    /// # Errors
    ///
    /// If there is none, one comes twice, or they are of several architectures.
    pub fn new(devices: Vec<(String, Device)>) -> Result<Self, PlacementError> {
        let (first_name, first) = devices.first().ok_or(PlacementError::NoDevice)?;
        for (index, (name, device)) in devices.iter().enumerate().skip(1) {
            if devices[..index].iter().any(|(_, known)| known == device) {
                return Err(PlacementError::Repeated {
                    device: name.clone(),
                });
            }
            let [architecture, expected] = [device, first].map(architecture);
            if architecture != expected {
                return Err(PlacementError::Unlike {
                    device: name.clone(),
                    architecture,
                    first: first_name.clone(),
                    expected,
                });
            }
        }
        let (names, devices): (Vec<_>, Vec<_>) = devices.into_iter().unzip();
        Ok(Self {
            memory: vec![None; devices.len()],
            names,
            devices,
            split: None,
            parallel: Parallel::default(),
            context: DEFAULT_CONTEXT,
        })
    }

    /// Gives each device so many layers, in place of as many as balance the bytes.
    #[must_use]
    pub fn with_split(mut self, split: Option<Vec<usize>>) -> Self {
        self.split = split;
        self
    }

    /// Gives each device some of the layers, or a part of each.
    #[must_use]
    pub fn with_parallel(mut self, parallel: Parallel) -> Self {
        self.parallel = parallel;
        self
    }

    /// Counts the caches of so many positions, of all texts together, in place of
    /// [`DEFAULT_CONTEXT`].
    #[must_use]
    pub fn with_context(mut self, positions: usize) -> Self {
        self.context = positions;
        self
    }

    /// Refuses what takes more than so many bytes on any device.
    #[must_use]
    pub fn with_memory(mut self, bytes: usize) -> Self {
        self.memory.fill(Some(bytes));
        self
    }

    /// An error with the name that a device has here.
    pub(crate) fn named(&self, mut error: PlacementError) -> PlacementError {
        if let PlacementError::Refused { device, .. } = &mut error {
            let known = self.devices.iter().position(|own| name(own) == *device);
            *device = known.map_or_else(|| device.clone(), |known| self.names[known].clone());
        }
        error
    }

    /// The devices, in the order of the layers that they are to have.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Positions whose caches count.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Divides a model of so many bytes. Among several devices, the log has the plan.
    ///
    /// # Errors
    ///
    /// If it has too few layers, or such as cannot be divided, the split does not fit it, or a
    /// device has too little memory.
    pub fn place(
        &self,
        config: &ModelConfig,
        model: &ModelBytes,
    ) -> Result<Placement, PlacementError> {
        let parallel = self.chosen(config, model, || {
            let group = DeviceGroup::new(&self.devices);
            group.is_ok_and(|group| *group.route() == GroupRoute::Memory)
        });
        let plan = self.plan(config, model, parallel)?;
        if self.devices.len() > 1 {
            let lines = self.lines(&plan, parallel);
            lines.for_each(|line| log::info!("{line}"));
        }
        if parallel == Parallel::Tensor || self.devices.len() == 1 {
            return Placement::tensor(&self.devices, model.layers.len());
        }
        Placement::new(&self.devices, &plan.counts())
    }

    fn plan(
        &self,
        config: &ModelConfig,
        model: &ModelBytes,
        parallel: Parallel,
    ) -> Result<Plan, PlacementError> {
        let split = self.split.as_deref();
        let plan = Plan::new(config, model, &self.names, parallel, split)?;
        plan.check(&self.names, &self.memory)?;
        Ok(plan)
    }

    /// What [`Parallel::Auto`] means for a model. Devices are asked last whether they can write to
    /// each other's memory.
    fn chosen(
        &self,
        config: &ModelConfig,
        model: &ModelBytes,
        can_exchange: impl FnOnce() -> bool,
    ) -> Parallel {
        if self.parallel != Parallel::Auto {
            return self.parallel;
        }
        let fits = || self.plan(config, model, Parallel::Tensor).is_ok();
        match self.devices.len() > 1 && fits() && can_exchange() {
            true => Parallel::Tensor,
            false => Parallel::Layers,
        }
    }

    /// What each device has.
    fn lines(&self, plan: &Plan, parallel: Parallel) -> impl Iterator<Item = String> {
        let what = match parallel {
            Parallel::Tensor => "a part of each of the layers",
            Parallel::Layers | Parallel::Auto => "layers",
        };
        let devices = self.names.iter().zip(&plan.runs).zip(&plan.bytes);
        devices.map(move |((name, run), bytes)| {
            let (first, last) = (run.start, run.end.saturating_sub(1));
            let PartBytes { weights, cache } = bytes;
            format!(
                "{name}: {what} {first} to {last}, {weights} bytes of weights, {cache} of caches"
            )
        })
    }
}

#[cfg(all(test, feature = "flex"))]
#[path = "tests.rs"]
mod tests;
