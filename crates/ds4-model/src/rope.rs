//! Rotary position embedding: frequencies, and tables of their angles.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_ds4_ops::attention::{self, Positions};

use crate::config::YarnConfig;

/// Parameters of one rotary embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct RotaryConfig {
    /// Number of rotated channels, twice the number of frequencies.
    pub dim: usize,
    /// Base of the geometric series of frequencies.
    pub theta: f64,
    /// Frequency scaling for long contexts.
    pub yarn: Option<YarnConfig>,
}

impl RotaryConfig {
    /// The frequencies in radians per position: `dim / 2` of them.
    ///
    /// # Example
    ///
    /// ```
    /// use ds4_model::rope::RotaryConfig;
    ///
    /// let rotary = RotaryConfig { dim: 4, theta: 10000.0, yarn: None };
    /// assert_eq!(rotary.frequencies(), [1.0, 0.01]);
    /// ```
    pub fn frequencies(&self) -> Vec<f32> {
        let dim = self.dim as f64;
        let plain = (0..self.dim / 2).map(|i| self.theta.powf(-2.0 * i as f64 / dim));
        let Some(yarn) = self.yarn else {
            return plain.map(|f| f as f32).collect();
        };
        let context = yarn.original_max_position_embeddings as f64;
        let rotations_at = |rotations: f64| {
            dim * (context / (rotations * std::f64::consts::TAU)).ln() / (2.0 * self.theta.ln())
        };
        let low = rotations_at(yarn.beta_fast).floor().max(0.0);
        let mut high = rotations_at(yarn.beta_slow).ceil().min(dim - 1.0);
        if low == high {
            high += 0.001;
        }
        plain
            .enumerate()
            .map(|(i, f)| {
                let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                (f * (1.0 - ramp) + f / yarn.factor * ramp) as f32
            })
            .collect()
    }
}

/// Cosines and sines of all angles up to some position, on a device.
///
/// The angle is the f32 product of position and frequency, as in the released code: at long range
/// the model was trained with its rounding.
///
/// Tables of the same frequencies that one thread makes on a device are one as long as it is long
/// enough. What they hold is worked out once for the process.
#[derive(Clone, Debug)]
pub(crate) struct RotaryTable {
    /// `[positions, dim]`: cosines of all frequencies, then sines.
    angles: Arc<Tensor<2>>,
}

/// The longest table of a device and of some frequencies, for as long as a cache has it.
type KnownTable = (Device, Arc<AngleValues>, Weak<Tensor<2>>);

thread_local! {
    /// Those that this thread has made.
    static TABLES: RefCell<Vec<KnownTable>> = RefCell::default();
}

impl RotaryTable {
    /// A table of at least so many positions.
    pub(crate) fn new(config: &RotaryConfig, positions: usize, device: &Device) -> Self {
        let values = AngleValues::of(config.frequencies());
        let angles = TABLES.with_borrow_mut(|tables| {
            tables.retain(|(.., angles)| angles.strong_count() > 0);
            let is_it =
                |(own, known, _): &&mut KnownTable| own == device && Arc::ptr_eq(known, &values);
            let known = tables.iter_mut().find(is_it);
            let long = known.as_ref().and_then(|(.., angles)| angles.upgrade());
            if let Some(long) = long.filter(|angles| angles.dims()[0] >= positions) {
                return long;
            }
            let angles = Arc::new(values.upload(positions, device));
            let kept = Arc::downgrade(&angles);
            match known {
                Some((.., angles)) => *angles = kept,
                None => tables.push((device.clone(), values.clone(), kept)),
            }
            angles
        });
        Self { angles }
    }

    /// Whether tables of so many positions can be made at once. If not, what they hold begins to be
    /// worked out by another thread.
    pub(crate) fn is_ready(config: &RotaryConfig, positions: usize) -> bool {
        AngleValues::of(config.frequencies()).is_ready(positions)
    }

    pub(crate) fn grow(&mut self, config: &RotaryConfig, positions: usize) {
        if positions > self.angles.dims()[0] {
            *self = Self::new(config, positions, &self.angles.device());
        }
    }

    /// The table itself: `[positions, dim]`.
    pub(crate) fn angles(&self) -> Tensor<2> {
        Tensor::clone(&self.angles)
    }

    /// The rotation of consecutive positions from `start` (`[batch]`) on, all below the table's
    /// size.
    pub(crate) fn from(&self, start: Tensor<1, Int>) -> Rotation {
        Rotation {
            angles: self.angles(),
            start,
        }
    }
}

/// Positions of which the calling thread works the values out, if there is no time to wait for
/// another one to do it.
const AT_ONCE: usize = 1 << 12;

/// The elements of tables of some frequencies, on the host.
#[derive(Debug)]
struct AngleValues {
    frequencies: Vec<f32>,
    known: Mutex<KnownValues>,
}

#[derive(Debug, Default)]
struct KnownValues {
    /// Of the first positions.
    rows: Vec<f32>,
    /// A thread that works out more of them: those that follow.
    more: Option<JoinHandle<Vec<f32>>>,
}

/// One for each set of frequencies that is in use.
static ANGLE_VALUES: Mutex<Vec<Arc<AngleValues>>> = Mutex::new(Vec::new());

impl AngleValues {
    fn of(frequencies: Vec<f32>) -> Arc<Self> {
        let mut all = ANGLE_VALUES.lock().unwrap_or_else(PoisonError::into_inner);
        let known = all.iter().find(|known| known.frequencies == frequencies);
        if let Some(known) = known {
            return known.clone();
        }
        let new = Arc::new(Self {
            frequencies,
            known: Mutex::default(),
        });
        all.push(new.clone());
        new
    }

    /// Elements of a row.
    fn width(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// As many rows as a table has that is to have so many: numbers of rows grow by factors.
    fn rows(positions: usize) -> usize {
        positions.checked_next_power_of_two().unwrap_or(positions)
    }

    fn is_ready(self: &Arc<Self>, positions: usize) -> bool {
        let mut known = self.known();
        let more = known.more.take_if(|more| more.is_finished());
        self.add(&mut known, more);
        let (from, to) = (
            known.rows.len() / self.width().max(1),
            Self::rows(positions),
        );
        if to <= from.max(AT_ONCE) {
            return true;
        }
        if known.more.is_none() {
            let values = self.clone();
            let thread = thread::Builder::new().name("rotary tables".to_owned());
            known.more = thread.spawn(move || values.angles(from, to)).ok();
        }
        // Without a thread, whoever makes a table works its values out.
        known.more.is_none()
    }

    /// A table of at least so many positions.
    fn upload(&self, positions: usize, device: &Device) -> Tensor<2> {
        let mut known = self.known();
        let (width, positions) = (self.width(), Self::rows(positions));
        let more = known.more.take();
        self.add(&mut known, more);
        let from = known.rows.len() / width.max(1);
        if from < positions {
            let rest = self.angles(from, positions);
            known.rows.extend(rest);
        }
        let rows = known.rows[..positions * width].to_vec();
        drop(known);
        let rows = TensorData::new(rows, [positions, width]);
        Tensor::from_data(rows, (device, DType::F32))
    }

    fn known(&self) -> MutexGuard<'_, KnownValues> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds what a thread has worked out.
    fn add(&self, known: &mut KnownValues, more: Option<JoinHandle<Vec<f32>>>) {
        if let Some(Ok(more)) = more.map(JoinHandle::join) {
            known.rows.extend(more);
        }
    }

    /// The rows of the positions from one to another.
    fn angles(&self, from: usize, to: usize) -> Vec<f32> {
        let mut values = Vec::with_capacity((to - from) * self.width());
        for position in from..to {
            let angle = |f: &f32| f64::from(position as f32 * f);
            values.extend(self.frequencies.iter().map(|f| angle(f).cos() as f32));
            values.extend(self.frequencies.iter().map(|f| angle(f).sin() as f32));
        }
        values
    }
}

/// The rotation of consecutive positions, in every sequence from its own first one.
#[derive(Clone, Debug)]
pub(crate) struct Rotation {
    /// The angles of all positions, as [`burn_ds4_ops::attention::rotate_at`] takes them.
    pub(crate) angles: Tensor<2>,
    /// The first position of each sequence: `[batch]`.
    pub(crate) start: Tensor<1, Int>,
}

impl Rotation {
    /// The positions, as operators take them.
    pub(crate) fn positions(&self) -> Positions {
        Positions {
            angles: self.angles.clone(),
            start: self.start.clone(),
        }
    }

    /// Rotates the trailing channels of `x`: `[batch, count, heads, width]`.
    pub(crate) fn apply(&self, x: Tensor<4>) -> Tensor<4> {
        self.rotate(x, false)
    }

    /// Rotates back.
    pub(crate) fn apply_inverse(&self, x: Tensor<4>) -> Tensor<4> {
        self.rotate(x, true)
    }

    fn rotate(&self, x: Tensor<4>, inverse: bool) -> Tensor<4> {
        attention::rotate_at(x, self.angles.clone(), self.start.clone(), inverse)
            .expect("positions of the table, and no more channels than `x` has")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(theta: f64) -> RotaryConfig {
        RotaryConfig {
            dim: 4,
            theta,
            yarn: None,
        }
    }

    #[cfg(feature = "flex")]
    #[test]
    fn tables_of_a_device_are_one_and_grow_without_a_change() {
        let (config, device) = (plain(301.0), Device::flex());
        let short = RotaryTable::new(&config, 5, &device);
        let same = RotaryTable::new(&config, 8, &device);
        assert!(Arc::ptr_eq(&short.angles, &same.angles));
        let mut grown = same.clone();
        grown.grow(&config, 3000);
        assert_eq!(grown.angles.dims(), [4096, 4]);
        let first = grown.angles().slice([0..8, 0..4]).into_data();
        assert_eq!(first, same.angles().into_data());
        // The longest is the one that others share.
        let next = RotaryTable::new(&config, 5, &device);
        assert!(Arc::ptr_eq(&next.angles, &grown.angles));
        let other = RotaryTable::new(&plain(302.0), 5, &device);
        assert!(!Arc::ptr_eq(&other.angles, &next.angles));
        for position in [0, 7, 4095] {
            let [fast, slow] = [1.0, 1.0 / 301f64.sqrt()].map(|f| f as f32);
            let angles = [fast, slow].map(|f| f64::from(position as f32 * f));
            let expected = [angles.map(f64::cos), angles.map(f64::sin)].concat();
            let expected: Vec<f32> = expected.into_iter().map(|value| value as f32).collect();
            let row = grown.angles().slice([position..position + 1, 0..4]);
            assert_eq!(row.into_data().iter::<f32>().collect::<Vec<_>>(), expected);
        }
    }

    #[cfg(feature = "flex")]
    #[test]
    fn long_tables_are_worked_out_by_another_thread() {
        let config = plain(303.0);
        assert!(RotaryTable::is_ready(&config, AT_ONCE));
        assert!(!RotaryTable::is_ready(&config, 1 << 16), "a thread begins");
        while !RotaryTable::is_ready(&config, 1 << 16) {
            thread::yield_now();
        }
        let values = AngleValues::of(config.frequencies());
        assert_eq!(values.known().rows.len(), 4 << 16);
        // One that nobody waited for.
        assert!(!RotaryTable::is_ready(&config, 1 << 17));
        let table = RotaryTable::new(&config, 1 << 17, &Device::flex());
        assert_eq!(table.angles.dims(), [1 << 17, 4]);
    }

    #[test]
    fn yarn_keeps_fast_frequencies_and_divides_slow_ones() {
        let config = RotaryConfig {
            dim: 64,
            theta: 160000.0,
            yarn: Some(YarnConfig {
                factor: 16.0,
                original_max_position_embeddings: 65536,
                beta_fast: 32.0,
                beta_slow: 1.0,
            }),
        };
        let plain = RotaryConfig {
            yarn: None,
            ..config.clone()
        };
        let (scaled, plain) = (config.frequencies(), plain.frequencies());
        // The released parameters ramp from channel 15 to channel 25.
        assert_eq!(scaled[..=15], plain[..=15]);
        assert!(scaled[16] < plain[16]);
        for i in 25..32 {
            assert_eq!(scaled[i], plain[i] / 16.0);
        }
        let half = plain[20] * 0.5 + plain[20] / 16.0 * 0.5;
        assert!((scaled[20] / half - 1.0).abs() < 1e-6);
    }
}
