//! Which entries of a row are the largest, by a sort, for the tests and the benchmarks of top-k.

use std::ops::Range;

use burn::tensor::{Device, FloatDType, Int, IntDType, Tensor, TensorData};
use burn_ds4_ops::topk::{Windows, top_k_ids};

use super::common::integer_values;

/// The columns of a row, best first: value descending, column ascending, NaN as `-inf`.
pub struct Ranking(Vec<u32>);

impl Ranking {
    pub fn of(row: &[f32]) -> Self {
        let value = |v: f32| if v.is_nan() { f32::NEG_INFINITY } else { v };
        let mut entries: Vec<(f32, u32)> = row.iter().map(|&v| value(v)).zip(0..).collect();
        entries.sort_unstable_by(|a, b| {
            let values = b.0.partial_cmp(&a.0).expect("no NaN is left");
            values.then(a.1.cmp(&b.1))
        });
        Self(entries.into_iter().map(|entry| entry.1).collect())
    }

    /// Of a window, the `k` best or as many as it has, best first, relative to its start.
    pub fn best(&self, window: &Range<usize>, k: usize) -> Vec<i64> {
        let columns = self.0.iter().map(|&column| column as usize);
        let inside = columns.filter(|column| window.contains(column));
        let wanted = inside.take(k.min(window.len()));
        wanted.map(|c| (c - window.start) as i64).collect()
    }

    /// The same ascending, and filled up with -1.
    pub fn ids(&self, window: &Range<usize>, k: usize) -> Vec<i64> {
        let mut ids = self.best(window, k);
        ids.sort_unstable();
        ids.resize(k, -1);
        ids
    }
}

/// The columns between two bounds of any size.
pub fn window(start: impl Into<i128>, end: impl Into<i128>, columns: usize) -> Range<usize> {
    let clamped = |bound: i128| bound.clamp(0, columns as i128) as usize;
    let start = clamped(start.into());
    start..clamped(end.into()).max(start)
}

/// Rows with their rankings. A tensor of more rows than that has them over and over.
pub struct Rows {
    pub columns: usize,
    dtype: FloatDType,
    data: Vec<f32>,
    rankings: Vec<Ranking>,
}

impl Rows {
    pub fn new(columns: usize, data: Vec<f32>) -> Self {
        Self::of_dtype(columns, data, FloatDType::F32)
    }

    /// Rounded to a dtype, on the host: a device may flush what is not normal.
    pub fn of_dtype(columns: usize, data: Vec<f32>, dtype: FloatDType) -> Self {
        let data: Vec<f32> = match dtype {
            FloatDType::F32 => data,
            _ => {
                let shape = [data.len()];
                let rounded = TensorData::new(data, shape).convert_dtype(dtype.into());
                rounded.iter::<f32>().collect()
            }
        };
        let rankings = data.chunks(columns).map(Ranking::of).collect();
        Self {
            columns,
            dtype,
            data,
            rankings,
        }
    }

    /// How many there are before they repeat.
    pub fn distinct(&self) -> usize {
        self.rankings.len()
    }

    pub fn row(&self, row: usize) -> &[f32] {
        let row = row % self.distinct();
        &self.data[row * self.columns..(row + 1) * self.columns]
    }

    pub fn ranking(&self, row: usize) -> &Ranking {
        &self.rankings[row % self.distinct()]
    }

    /// The first of these many rows.
    pub fn tensor(&self, rows: usize, device: &Device) -> Tensor<2> {
        let once = rows.min(self.distinct());
        let data = self.data[..once * self.columns].to_vec();
        let data = TensorData::new(data, [once, self.columns]).convert_dtype(self.dtype.into());
        let tensor = Tensor::from_data(data, (device, self.dtype.into()));
        if rows <= once {
            return tensor;
        }
        // Repeated on the device: what is sent there is small.
        tensor
            .repeat_dim(0, rows.div_ceil(once))
            .slice([0..rows, 0..self.columns])
    }

    /// What a device must give for these windows, one for each row.
    pub fn ids(&self, windows: &[Range<usize>], k: usize) -> Vec<i64> {
        let rows = windows.iter().enumerate();
        rows.flat_map(|(row, window)| self.ranking(row).ids(window, k))
            .collect()
    }

    /// Compares the result for so many rows without windows.
    #[track_caller]
    pub fn check(&self, rows: usize, k: usize, device: &Device, what: &str) {
        let actual =
            top_k_ids(self.tensor(rows, device), Windows::All, k).expect("arguments that fit");
        let whole = 0..self.columns;
        assert_ids(actual, &self.ids(&vec![whole; rows], k), what);
    }

    /// Compares the result for rows with a window each.
    #[track_caller]
    pub fn check_windows(&self, windows: &[Range<usize>], k: usize, device: &Device, what: &str) {
        let logits = self.tensor(windows.len(), device);
        let actual = top_k_ids(logits, ranges(windows, device), k).expect("arguments that fit");
        assert_ids(actual, &self.ids(windows, k), what);
    }
}

/// An i32 tensor.
pub fn int32<const D: usize>(data: &[i64], shape: [usize; D], device: &Device) -> Tensor<D, Int> {
    typed(data, shape, IntDType::I32, device)
}

/// An integer tensor of a dtype that holds all of `data`.
pub fn typed<const D: usize>(
    data: &[i64],
    shape: [usize; D],
    dtype: IntDType,
    device: &Device,
) -> Tensor<D, Int> {
    let data = TensorData::new(data.to_vec(), shape).convert_dtype(dtype.into());
    Tensor::from_data(data, (device, dtype.into()))
}

/// Windows as bounds on a device.
pub fn ranges(windows: &[Range<usize>], device: &Device) -> Windows {
    let bounds = |bound: fn(&Range<usize>) -> usize| {
        let bounds: Vec<i64> = windows.iter().map(|w| bound(w) as i64).collect();
        int32(&bounds, [windows.len()], device)
    };
    Windows::Ranges {
        starts: bounds(|window| window.start),
        ends: bounds(|window| window.end),
    }
}

/// Fails with the number of rows that differ, and for the first of them what is missing and what
/// should not be there.
#[track_caller]
pub fn assert_ids(actual: Tensor<2, Int>, expected: &[i64], what: &str) {
    let [rows, k] = actual.dims();
    assert_eq!(actual.dtype(), burn::tensor::DType::I32, "{what}");
    let actual = integer_values(actual);
    assert_eq!(actual.len(), expected.len(), "{what}: number of ids");
    let slots = |row: usize| row * k..(row + 1) * k;
    let wrong: Vec<usize> = (0..rows)
        .filter(|&row| actual[slots(row)] != expected[slots(row)])
        .collect();
    let Some(&row) = wrong.first() else {
        return;
    };
    let (actual, expected) = (&actual[slots(row)], &expected[slots(row)]);
    let slot = (0..k)
        .find(|&slot| actual[slot] != expected[slot])
        .unwrap_or_default();
    let only_in = |these: &[i64], those: &[i64]| -> (usize, Vec<i64>) {
        let those: std::collections::HashSet<i64> = those.iter().copied().collect();
        let only = these.iter().copied().filter(|id| !those.contains(id));
        let only: Vec<i64> = only.collect();
        (only.len(), only.into_iter().take(8).collect())
    };
    let (missing, unexpected) = (only_in(expected, actual), only_in(actual, expected));
    panic!(
        "{what}: {} of {rows} rows differ, first row {row} from slot {slot} on, where {} stands \
         for {}; of its ids {} are missing: {:?}, {} should not be there: {:?}",
        wrong.len(),
        actual[slot],
        expected[slot],
        missing.0,
        missing.1,
        unexpected.0,
        unexpected.1,
    );
}
