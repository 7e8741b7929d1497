//! How many layers each device has.

use std::cmp::Ordering;
use std::ops::Range;

use super::bytes::{ModelBytes, PartBytes};
use super::error::PlacementError;
use super::runs::runs_of;
use super::share::{Parallel, check, check_shared, shared_rows};
use crate::config::ModelConfig;

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
        let is_whole = parallel != Parallel::Tensor || names.len() == 1;
        check_shared(config, std::iter::empty(), is_whole)?;
        match (parallel, split) {
            (Parallel::Tensor, Some(split)) => Err(PlacementError::SplitTensor {
                split: split.to_vec(),
            }),
            (Parallel::Tensor, None) => {
                check(config, names.len())?;
                Self::tensor(model, names)
            }
            (Parallel::Layers | Parallel::Auto, Some(split)) => {
                let plan = Self::split(model, names, split)?;
                check_shared(config, plan.runs.iter().map(|run| run.start), true)?;
                Ok(plan)
            }
            (Parallel::Layers | Parallel::Auto, None) => {
                let plan = Self::balanced_at(model, names, |layer| config.may_begin(layer))?;
                plan.ok_or_else(|| shared_rows(config))
            }
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
        let plan = Self::balanced_at(model, names, |_| true)?;
        Ok(plan.expect("there is a layer for each device"))
    }

    /// [`balanced`](Self::balanced) where devices may begin with some layers only. `None` where
    /// there are fewer of those than devices.
    fn balanced_at(
        model: &ModelBytes,
        names: &[String],
        may_begin: impl Fn(usize) -> bool,
    ) -> Result<Option<Self>, PlacementError> {
        let (layers, devices) = (model.layers.len(), names.len());
        match devices {
            0 => return Err(PlacementError::NoDevice),
            1 => {
                let whole = Self::of_runs(model, std::iter::once(0..layers).collect());
                return Ok(Some(whole));
            }
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
                let starts = starts.filter(|start| may_begin(*start));
                let ways = starts.filter_map(|start| {
                    let before = best[start].as_ref()?;
                    Some(before.with(model, start..end))
                });
                ways.min_by(Way::order)
            });
            let next = next.collect();
            best = next;
        }
        let way = best[layers].take();
        Ok(way.map(|way| Self::of_runs(model, way.runs)))
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
