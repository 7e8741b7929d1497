//! Which layers of a model live on which device.
//!
//! The layers are divided into contiguous runs, one for each device. The embedding is with the
//! first run, the head and what drafts with the last. Only the residual streams go from one device
//! to the next. The cache of a layer is where the layer is.
//!
//! [`Devices`] says which devices there are, and a [`Plan`] how many layers each has: as many as
//! balance the bytes of weights and caches. Both become a [`Placement`].

use std::cmp::Ordering;
use std::ops::Range;
use std::sync::Once;

use burn::tensor::{Device, FloatDType};
use burn_ds4_ops::collective::{DeviceGroup, GroupRoute};
use burn_ds4_ops::device::architecture;
use burn_ds4_ops::transfer::Route;

use crate::cache::{CacheConfig, CacheLayout, Rollback};
use crate::config::ModelConfig;
use crate::generate::MAX_DRAFTS;
use crate::parallel::{self, Parallel, Share, share_of_bytes};

/// Positions of the one text whose cache counts where nobody says how long texts are.
pub const DEFAULT_CONTEXT: usize = 4096;

/// Why a model cannot be divided among devices as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// No device is named.
    #[error("devices: none is named")]
    NoDevice,
    /// A device is named twice.
    #[error("devices: {device} is named twice")]
    Repeated {
        /// The device.
        device: String,
    },
    /// Devices are of several architectures, so that the bits of a text would depend on the split.
    #[error("devices: {device} is a {architecture}, {first} a {expected}: they must be alike")]
    Unlike {
        /// A device.
        device: String,
        /// What kernels are compiled for there.
        architecture: String,
        /// The first device.
        first: String,
        /// What kernels are compiled for on the first device.
        expected: String,
    },
    /// There are more devices than layers.
    #[error(
        "devices: {devices} of them cannot share {layers} layers, {device} would be left without"
    )]
    TooManyDevices {
        /// Number of devices.
        devices: usize,
        /// Number of layers.
        layers: usize,
        /// The first device without a layer.
        device: String,
    },
    /// A split has not one number for each device.
    #[error("split {split:?}: it has {} numbers, there are {devices} devices", split.len())]
    SplitCount {
        /// The split.
        split: Vec<usize>,
        /// Number of devices.
        devices: usize,
    },
    /// A split leaves a device without a layer.
    #[error("split {split:?}: it has no layer for {device}")]
    EmptyRun {
        /// The split.
        split: Vec<usize>,
        /// The device.
        device: String,
    },
    /// A split is of another number of layers.
    #[error("split {split:?}: it has {sum} layers, the model has {layers}")]
    SplitSum {
        /// The split.
        split: Vec<usize>,
        /// Its sum.
        sum: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// Devices cannot have equal parts of every layer.
    #[error(
        "{what} ({size}) cannot be divided among {devices} devices, each with a multiple of \
         {multiple}"
    )]
    Indivisible {
        /// Field of the configuration, or what follows from fields.
        what: &'static str,
        /// Its value.
        size: usize,
        /// Number of devices.
        devices: usize,
        /// What each device must have a multiple of, so that no block of weights with one scale is
        /// shared.
        multiple: usize,
    },
    /// Layers of each device are named, but each has a part of every layer.
    #[error("split {split:?}: each device has a part of every layer")]
    SplitTensor {
        /// The split.
        split: Vec<usize>,
    },
    /// The layers are in parts, which cannot be moved.
    #[error("the layers are in parts on several devices, and cannot be placed again")]
    Divided,
    /// A device has not taken what is to be there, for example because its memory is full.
    #[error("{device}: it has not taken its part of the model: {reason}")]
    Refused {
        /// What the device is called.
        device: String,
        /// What the device says.
        reason: String,
    },
    /// A device has too little memory for its layers.
    #[error(
        "{device}: layers {} to {} take {weights} bytes of weights and {cache} of caches, the \
         device has {memory}",
        layers.start,
        layers.end - 1
    )]
    OutOfMemory {
        /// The device.
        device: String,
        /// Its layers.
        layers: Range<usize>,
        /// Bytes of their weights, and of what else is on the device.
        weights: usize,
        /// Bytes of their caches.
        cache: usize,
        /// Bytes that the device has.
        memory: usize,
    },
}

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

/// A part of a model, for which a placement has a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// The token embeddings.
    Embedding,
    /// A layer of the trunk.
    Layer(usize),
    /// The head, the norm and the output matrix.
    Head,
    /// What drafts.
    Drafter,
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
fn runs_of(split: &[usize], names: &[String]) -> Result<Vec<Range<usize>>, PlacementError> {
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

/// Bytes that something takes on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartBytes {
    /// Of weights.
    pub weights: usize,
    /// Of the caches of all texts.
    pub cache: usize,
}

impl PartBytes {
    /// Weights and caches together.
    pub fn total(self) -> usize {
        self.weights.saturating_add(self.cache)
    }

    fn plus(self, other: Self) -> Self {
        Self {
            weights: self.weights.saturating_add(other.weights),
            cache: self.cache.saturating_add(other.cache),
        }
    }
}

/// Bytes of the parts of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelBytes {
    /// Of the token embeddings. What drafts has a copy of them where it is on another device.
    pub embedding: usize,
    /// Of each layer.
    pub layers: Vec<PartBytes>,
    /// Of the weights of each layer of which devices can have parts.
    pub divided: Vec<usize>,
    /// Of head, norm and output matrix.
    pub head: usize,
    /// Of what drafts, if there is anything.
    pub drafter: Option<PartBytes>,
    /// Of what the caches have on each device, however many layers are there.
    pub tables: usize,
}

impl ModelBytes {
    /// Says that so many bytes of those of a part are weights of which devices can have parts.
    pub(crate) fn divide(&mut self, place: Place, bytes: usize) {
        if let Place::Layer(layer) = place {
            self.divided.resize(self.layers.len().max(layer + 1), 0);
            self.divided[layer] = self.divided[layer].saturating_add(bytes);
        }
    }

    /// Adds bytes of weights to those of a part.
    pub(crate) fn add(&mut self, place: Place, bytes: usize) {
        let weights = match place {
            Place::Embedding => &mut self.embedding,
            Place::Layer(layer) => {
                let layers = self.layers.len().max(layer + 1);
                self.layers.resize(layers, PartBytes::default());
                &mut self.layers[layer].weights
            }
            Place::Head => &mut self.head,
            Place::Drafter => &mut self.drafter.get_or_insert_default().weights,
        };
        *weights = weights.saturating_add(bytes);
    }

    /// Sets the bytes of the caches of one text of so many positions. Of more texts together, which
    /// are shorter, the caches take a little more.
    #[must_use]
    pub fn with_caches(
        mut self,
        config: &ModelConfig,
        dtype: FloatDType,
        positions: usize,
    ) -> Self {
        let options = CacheConfig {
            capacity: positions,
            rollback: Rollback::Bounded(MAX_DRAFTS),
            dtype,
            ..CacheConfig::default()
        };
        let trunk = CacheLayout::trunk(config);
        let rings = trunk.layer_bytes(options);
        for (layer, cache) in self.layers.iter_mut().zip(rings) {
            layer.cache = cache;
        }
        self.tables = trunk.table_bytes(options);
        if let Some(drafter) = &mut self.drafter {
            let layout = match config.dspark {
                Some(_) => CacheLayout::dspark(config),
                None => CacheLayout::mtp(config),
            };
            let rings: usize = layout.layer_bytes(options).iter().sum();
            drafter.cache = rings.saturating_add(layout.table_bytes(options));
        }
        self
    }

    /// Bytes of all weights on one device.
    pub fn weights(&self) -> usize {
        let layers = self.layers.iter().map(|layer| layer.weights);
        let drafter = self.drafter.iter().map(|drafter| drafter.weights);
        let parts = layers.chain(drafter).chain([self.embedding, self.head]);
        parts.fold(0, usize::saturating_add)
    }

    /// Bytes of a rank of `ranks`, each of which has a part of every layer.
    fn of_rank(&self, rank: usize, ranks: usize) -> PartBytes {
        let divided = self.divided.iter().copied().chain(std::iter::repeat(0));
        let layers = self.layers.iter().zip(divided);
        let layers = layers.map(|(layer, divided)| PartBytes {
            weights: share_of_bytes(layer.weights, divided, ranks),
            cache: layer.cache,
        });
        let head = self.head.div_ceil(ranks);
        let own = PartBytes {
            weights: self.embedding.saturating_add(head),
            cache: self.tables,
        };
        let bytes = layers.fold(own, PartBytes::plus);
        if rank + 1 < ranks {
            return bytes;
        }
        // What drafts needs the whole output matrix.
        let whole = PartBytes {
            weights: self.head,
            cache: 0,
        };
        bytes.plus(whole).plus(self.drafter.unwrap_or_default())
    }

    /// Bytes of a run of layers, with what else is on its device.
    fn of_run(&self, run: &Range<usize>) -> PartBytes {
        let (is_first, is_last) = (run.start == 0, run.end == self.layers.len());
        let tables = PartBytes {
            weights: 0,
            cache: self.tables,
        };
        let layers = self.layers[run.clone()].iter();
        let mut bytes = layers.fold(tables, |sum, layer| sum.plus(*layer));
        let mut more = |weights| {
            bytes = bytes.plus(PartBytes { weights, cache: 0 });
        };
        if is_first {
            more(self.embedding);
        }
        if is_last {
            more(self.head);
            if self.drafter.is_some() && !is_first {
                more(self.embedding);
            }
        }
        match self.drafter.filter(|_| is_last) {
            Some(drafter) => bytes.plus(drafter),
            None => bytes,
        }
    }
}

/// How many layers each of some devices has, and the bytes that they take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The layers of each device.
    pub runs: Vec<Range<usize>>,
    /// The bytes on each device.
    pub bytes: Vec<PartBytes>,
}

impl Plan {
    /// Divides a model among devices of these names: in parts, by a split, or balanced.
    /// [`Parallel::Auto`] means whole layers here, since names do not tell what devices can do.
    ///
    /// # Errors
    ///
    /// If there is no device, the layers cannot be divided, or the split does not fit them.
    pub fn new(
        config: &ModelConfig,
        model: &ModelBytes,
        names: &[String],
        parallel: Parallel,
        split: Option<&[usize]>,
    ) -> Result<Self, PlacementError> {
        match (parallel, split) {
            (Parallel::Tensor, Some(split)) => Err(PlacementError::SplitTensor {
                split: split.to_vec(),
            }),
            (Parallel::Tensor, None) => {
                parallel::check(config, names.len())?;
                Self::tensor(model, names)
            }
            (Parallel::Layers | Parallel::Auto, Some(split)) => Self::split(model, names, split),
            (Parallel::Layers | Parallel::Auto, None) => Self::balanced(model, names),
        }
    }

    /// Divides the layers among devices of these names so that the fullest device has as little as
    /// possible, and the others as much alike as possible.
    ///
    /// # Errors
    ///
    /// If there is no device, or not a layer for each.
    ///
    /// # Example
    ///
    /// ```
    /// use ds4_model::placement::{ModelBytes, PartBytes, Plan};
    ///
    /// // Four layers of 10 bytes, and a head of 15.
    /// let layer = PartBytes { weights: 10, cache: 0 };
    /// let model = ModelBytes { layers: vec![layer; 4], head: 15, ..ModelBytes::default() };
    /// let plan = Plan::balanced(&model, &["first".into(), "second".into()])?;
    /// assert_eq!(plan.runs, [0..3, 3..4]);
    /// assert_eq!(plan.bytes.iter().map(|part| part.total()).collect::<Vec<_>>(), [30, 25]);
    /// # Ok::<(), ds4_model::placement::PlacementError>(())
    /// ```
    pub fn balanced(model: &ModelBytes, names: &[String]) -> Result<Self, PlacementError> {
        let (layers, devices) = (model.layers.len(), names.len());
        match devices {
            0 => return Err(PlacementError::NoDevice),
            1 => return Ok(Self::of_runs(model, std::iter::once(0..layers).collect())),
            _ if devices > layers => {
                return Err(PlacementError::TooManyDevices {
                    devices,
                    layers,
                    device: names[layers].clone(),
                });
            }
            _ => {}
        }
        // The best way to give the first layers, so many, to the devices so far.
        let mut best = vec![Some(Way::default())];
        best.resize(layers + 1, None);
        for device in 0..devices {
            let left = devices - 1 - device;
            let reached = device + 1..=layers - left;
            let next = (0..=layers).map(|end| {
                let starts = (device..end).rev().filter(|_| reached.contains(&end));
                let ways = starts.filter_map(|start| {
                    let before = best[start].as_ref()?;
                    Some(before.with(model, start..end))
                });
                ways.min_by(Way::order)
            });
            let next = next.collect();
            best = next;
        }
        let way = best[layers]
            .take()
            .expect("there is a layer for each device");
        Ok(Self::of_runs(model, way.runs))
    }

    /// Gives each device of these names as many layers as `split` has for it.
    ///
    /// # Errors
    ///
    /// If there is no device, or the split does not fit devices and layers.
    pub fn split(
        model: &ModelBytes,
        names: &[String],
        split: &[usize],
    ) -> Result<Self, PlacementError> {
        let runs = runs_of(split, names)?;
        let (sum, layers) = (split.iter().sum(), model.layers.len());
        if sum != layers {
            return Err(PlacementError::SplitSum {
                split: split.to_vec(),
                sum,
                layers,
            });
        }
        Ok(Self::of_runs(model, runs))
    }

    /// Gives each device of these names an equal part of every layer.
    ///
    /// # Errors
    ///
    /// If there is no device.
    pub fn tensor(model: &ModelBytes, names: &[String]) -> Result<Self, PlacementError> {
        let (layers, ranks) = (model.layers.len(), names.len());
        match ranks {
            0 => return Err(PlacementError::NoDevice),
            1 => return Ok(Self::of_runs(model, std::iter::once(0..layers).collect())),
            _ => {}
        }
        let bytes = (0..ranks).map(|rank| model.of_rank(rank, ranks));
        Ok(Self {
            runs: vec![0..layers; ranks],
            bytes: bytes.collect(),
        })
    }

    fn of_runs(model: &ModelBytes, runs: Vec<Range<usize>>) -> Self {
        let bytes = runs.iter().map(|run| model.of_run(run)).collect();
        Self { runs, bytes }
    }

    /// Checks that each device has memory for its part, where that is known.
    ///
    /// # Errors
    ///
    /// For the first device that has not.
    pub fn check(&self, names: &[String], memory: &[Option<usize>]) -> Result<(), PlacementError> {
        let parts = self
            .runs
            .iter()
            .zip(&self.bytes)
            .zip(names.iter().zip(memory));
        for ((layers, bytes), (device, memory)) in parts {
            if let Some(memory) = memory.filter(|memory| bytes.total() > *memory) {
                return Err(PlacementError::OutOfMemory {
                    device: device.clone(),
                    layers: layers.clone(),
                    weights: bytes.weights,
                    cache: bytes.cache,
                    memory,
                });
            }
        }
        Ok(())
    }

    /// Layers of each device.
    pub fn counts(&self) -> Vec<usize> {
        self.runs.iter().map(ExactSizeIterator::len).collect()
    }
}

/// Runs of the first layers.
#[derive(Clone, Debug, Default)]
struct Way {
    runs: Vec<Range<usize>>,
    /// Bytes of the fullest device.
    largest: usize,
    /// Sum of the squares of all devices' bytes.
    squares: f64,
}

impl Way {
    fn with(&self, model: &ModelBytes, run: Range<usize>) -> Self {
        let total = model.of_run(&run).total();
        let mut runs = self.runs.clone();
        runs.push(run);
        Self {
            runs,
            largest: self.largest.max(total),
            squares: self.squares + (total as f64).powi(2),
        }
    }

    fn order(&self, other: &Self) -> Ordering {
        let largest = self.largest.cmp(&other.largest);
        largest.then(self.squares.total_cmp(&other.squares))
    }
}

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
        if parallel == Parallel::Tensor {
            return Placement::tensor(&self.devices, model.layers.len());
        }
        let runs = plan.runs.into_iter().zip(&self.devices);
        let runs = runs.map(|(layers, device)| Run {
            device: device.clone(),
            layers,
        });
        Ok(Placement {
            runs: runs.collect(),
            ranks: Vec::new(),
        })
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
#[path = "placement_tests.rs"]
mod tests;
