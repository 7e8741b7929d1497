//! Runs of layers.

use std::ops::Range;
use std::sync::Once;

use burn::tensor::Device;
use burn_ds4_ops::transfer::Route;

use super::bytes::{ModelBytes, PartBytes, Place};
use super::error::PlacementError;
use super::share::Share;

/// Layers that are on one device.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// The device.
    pub device: Device,
    /// The layers.
    pub layers: Range<usize>,
}

/// Which layers of a model live on which device: at least one run, each of at least one layer,
/// unless there is only one device.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    runs: Vec<Run>,
    /// The devices that have a part of every layer, of which the last is that of the run; none
    /// where layers are whole.
    ranks: Vec<Device>,
}

/// What is built by itself: the layers of a run, or a device's parts of all layers.
#[derive(Clone, Debug)]
pub(crate) struct Portion {
    pub(crate) device: Device,
    pub(crate) layers: Range<usize>,
    /// Which part of each layer, where they are divided.
    pub(crate) share: Option<Share>,
    is_first: bool,
    is_last: bool,
}

impl Portion {
    /// Whether it has the embedding.
    pub(crate) fn embeds(&self) -> bool {
        self.is_first || self.share.is_some()
    }

    /// Whether it has the head, the norm and the output matrix.
    pub(crate) fn concludes(&self) -> bool {
        self.is_last || self.share.is_some()
    }

    /// Whether others have parts of the same layers.
    pub(crate) fn is_repeated(&self) -> bool {
        self.share.is_some()
    }

    /// Whether it has what drafts.
    pub(crate) fn drafts(&self) -> bool {
        self.is_last
    }
}

impl Placement {
    /// All layers on one device.
    pub fn single(device: &Device, layers: usize) -> Self {
        let device = device.clone();
        Self {
            runs: vec![Run {
                device,
                layers: 0..layers,
            }],
            ranks: Vec::new(),
        }
    }

    /// A part of every layer on each of several devices. The embedding is on all of them; head and
    /// what drafts are on the last.
    ///
    /// A device may come several times, as in [`new`](Self::new).
    ///
    /// # Errors
    ///
    /// If there is no device.
    pub fn tensor(devices: &[Device], layers: usize) -> Result<Self, PlacementError> {
        let last = devices.last().ok_or(PlacementError::NoDevice)?;
        let ranks = match devices.len() {
            1 => Vec::new(),
            _ => devices.to_vec(),
        };
        Ok(Self {
            ranks,
            ..Self::single(last, layers)
        })
    }

    /// The devices that have a part of every layer; none where layers are whole.
    pub fn ranks(&self) -> &[Device] {
        &self.ranks
    }

    /// Where the layers of caches are: those of one device after those of another, where each has a
    /// part of every layer.
    pub(crate) fn of_caches(&self) -> Self {
        if self.ranks.is_empty() {
            return self.clone();
        }
        let layers = self.layers();
        let ranks = self.ranks.iter().enumerate();
        let runs = ranks.map(|(rank, device)| Run {
            device: device.clone(),
            layers: rank * layers..(rank + 1) * layers,
        });
        Self {
            runs: runs.collect(),
            ranks: Vec::new(),
        }
    }

    /// So many layers on each device, in their order.
    ///
    /// A device may come several times. It then has several runs, which compute what several
    /// devices would, so that a placement can be tested with one.
    ///
    /// # Errors
    ///
    /// If there is no device, or `split` has another number of entries or a 0.
    ///
    /// # Example
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::Device;
    /// use ds4_model::placement::Placement;
    ///
    /// // The same device twice.
    /// let device = Device::flex();
    /// let placement = Placement::new(&[device.clone(), device], &[3, 1])?;
    /// let layers: Vec<_> = placement.runs().iter().map(|run| run.layers.clone()).collect();
    /// assert_eq!(layers, [0..3, 3..4]);
    /// # }
    /// # Ok::<(), ds4_model::placement::PlacementError>(())
    /// ```
    pub fn new(devices: &[Device], split: &[usize]) -> Result<Self, PlacementError> {
        let names: Vec<String> = devices.iter().map(name).collect();
        let runs = runs_of(split, &names)?;
        let runs = runs.into_iter().zip(devices).map(|(layers, device)| {
            let device = device.clone();
            Run { device, layers }
        });
        Ok(Self {
            runs: runs.collect(),
            ranks: Vec::new(),
        })
    }

    /// What each run has.
    pub(crate) fn portions(&self) -> Vec<Portion> {
        let runs = self.runs.iter().enumerate();
        let runs = runs.map(|(index, run)| Portion {
            device: run.device.clone(),
            layers: run.layers.clone(),
            share: None,
            is_first: index == 0,
            is_last: index + 1 == self.runs.len(),
        });
        runs.collect()
    }

    /// What each device has, where several have a part of every layer, and what each run has
    /// otherwise.
    pub(crate) fn device_portions(&self) -> Vec<Portion> {
        let ranks = self.ranks.len();
        if ranks == 0 {
            return self.portions();
        }
        let portions = self.ranks.iter().enumerate();
        let portions = portions.map(|(rank, device)| Portion {
            device: device.clone(),
            layers: 0..self.layers(),
            share: Some(Share { rank, ranks }),
            is_first: rank == 0,
            is_last: rank + 1 == ranks,
        });
        portions.collect()
    }

    /// The runs, in the order of the layers.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.last_run().layers.end
    }

    /// The device of the embedding and of the first layer.
    pub fn first(&self) -> &Device {
        &self.runs[0].device
    }

    /// The device of the last layer, the head and what drafts.
    pub fn last(&self) -> &Device {
        &self.last_run().device
    }

    fn last_run(&self) -> &Run {
        self.runs.last().expect("there is at least one run")
    }

    /// Whether the layers are in several runs.
    pub fn is_divided(&self) -> bool {
        self.runs.len() > 1
    }

    /// The first `layers` layers, with the devices that have some of them.
    ///
    /// # Panics
    ///
    /// If there are fewer layers.
    pub fn first_layers(&self, layers: usize) -> Self {
        assert!(layers <= self.layers(), "layers: {layers} of {self:?}");
        let runs = self.runs.iter().enumerate();
        let runs = runs.filter(|(index, run)| *index == 0 || run.layers.start < layers);
        let runs = runs.map(|(_, run)| Run {
            device: run.device.clone(),
            layers: run.layers.start..run.layers.end.min(layers),
        });
        Self {
            runs: runs.collect(),
            ranks: self.ranks.clone(),
        }
    }

    /// Whether no device has two runs.
    pub(crate) fn is_distinct(&self) -> bool {
        let mut devices = self.runs.iter().map(|run| &run.device).enumerate();
        devices.all(|(index, device)| {
            let before = &self.runs[..index];
            before.iter().all(|run| run.device != *device)
        })
    }

    /// The bytes of the weights on each device.
    pub(crate) fn bytes_on_devices(&self, model: &ModelBytes) -> Vec<(Device, usize)> {
        let mut devices: Vec<(Device, usize)> = Vec::new();
        let runs = self.runs.iter();
        let runs = runs.map(|run| (&run.device, model.of_run(&run.layers)));
        let count = self.ranks.len();
        let ranks = self.ranks.iter().enumerate();
        let ranks = ranks.map(|(rank, device)| (device, model.of_rank(rank, count)));
        let runs = runs.filter(|_| count == 0).chain(ranks);
        for (device, PartBytes { weights, .. }) in runs {
            match devices.iter_mut().find(|(known, _)| known == device) {
                Some((_, bytes)) => *bytes = bytes.saturating_add(weights),
                None => devices.push((device.clone(), weights)),
            }
        }
        devices
    }

    pub(crate) fn device(&self, place: Place) -> &Device {
        match place {
            Place::Embedding => self.first(),
            Place::Layer(layer) => {
                let run = self.runs.iter().find(|run| run.layers.contains(&layer));
                &run.expect("a layer of the model").device
            }
            Place::Head | Place::Drafter => self.last(),
        }
    }

    /// Says once, in the log, if copies between neighbouring devices go through the host.
    pub(crate) fn warn_of_copies(&self) {
        static SAID: Once = Once::new();
        for pair in self.runs.windows(2) {
            let [from, to] = [0, 1].map(|index| &pair[index].device);
            let hint = match Route::between(from, to) {
                Route::Same | Route::Direct => continue,
                Route::Host => "",
                Route::HostWithoutNccl => {
                    ": NCCL is not found as `libnccl.so`; where there is only `libnccl.so.2`, link \
                     it under that name"
                }
            };
            let [from, to] = [from, to].map(name);
            SAID.call_once(|| {
                log::warn!("copies from {from} to {to} go through the host's memory{hint}");
            });
        }
    }
}

/// What a device is called in errors, if nobody has named it.
pub(crate) fn name(device: &Device) -> String {
    format!("{device:?}")
}

/// The runs of a split.
pub(super) fn runs_of(
    split: &[usize],
    names: &[String],
) -> Result<Vec<Range<usize>>, PlacementError> {
    if names.is_empty() {
        return Err(PlacementError::NoDevice);
    }
    if split.len() != names.len() {
        return Err(PlacementError::SplitCount {
            split: split.to_vec(),
            devices: names.len(),
        });
    }
    if let Some(empty) = split.iter().position(|layers| *layers == 0) {
        return Err(PlacementError::EmptyRun {
            split: split.to_vec(),
            device: names[empty].clone(),
        });
    }
    let mut start = 0;
    let runs = split.iter().map(|layers| {
        let run = start..start + layers;
        start = run.end;
        run
    });
    Ok(runs.collect())
}
