//! Arguments of operators, drawn from the bytes of a fuzzer.

use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use burn_ds4_ops::OpError;

use super::super::common::{FLOATS, read};
use super::super::distributions::Random;

/// What is hard on arithmetic.
const HOSTILE: [f32; 12] = [
    f32::NAN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::MAX,
    f32::MIN,
    1e30,
    -1e30,
    f32::MIN_POSITIVE,
    1e-45,
    -1e-40,
    -0.0,
    65_504.0,
];

/// Rows of which some have hostile values.
pub struct Rows {
    pub values: Vec<f32>,
    /// Of each row, whether it has none.
    pub tame: Vec<bool>,
}

/// Draws arguments. Where the bytes end, it goes on with random ones that depend on all of them.
pub struct Draw<'a> {
    bytes: std::slice::Iter<'a, u8>,
    rest: Random,
    /// Whether an argument has another shape or dtype than it should.
    spoilt: bool,
}

impl<'a> Draw<'a> {
    pub fn new(data: &'a [u8]) -> Self {
        let mix = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        Self {
            bytes: data.iter(),
            rest: Random::new(data.iter().fold(0xcbf2_9ce4_8422_2325, mix)),
            spoilt: false,
        }
    }

    fn byte(&mut self) -> u8 {
        let next = self.bytes.next().copied();
        next.unwrap_or_else(|| self.rest.bits() as u8)
    }

    /// In `0..count`, at most 256.
    pub fn below(&mut self, count: usize) -> usize {
        usize::from(self.byte()) % count
    }

    pub fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == count - 1
    }

    /// A size up to `most`, sometimes 0.
    pub fn size(&mut self, most: usize) -> usize {
        match self.one_in(16) {
            true => 0,
            false => 1 + self.below(most),
        }
    }

    pub fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())].clone()
    }

    pub fn dtype(&mut self) -> FloatDType {
        self.pick(&FLOATS)
    }

    pub fn seed(&mut self) -> u64 {
        (0..8).fold(0, |seed, _| seed << 8 | u64::from(self.byte()))
    }

    /// A number that every format holds, between -4 and 4.
    pub fn tame(&mut self) -> f32 {
        (f32::from(self.byte()) - 128.0) / 32.0
    }

    fn hostile(&mut self) -> f32 {
        match self.one_in(4) {
            true => f32::from_bits(self.seed() as u32),
            false => self.pick(&HOSTILE),
        }
    }

    /// A number below `end`, or one that is none of an index.
    pub fn index(&mut self, end: usize) -> i64 {
        let far = [-1, -2, end as i64, i64::from(i32::MAX), i64::from(i32::MIN)];
        match end == 0 || self.one_in(8) {
            true => self.pick(&far),
            false => self.below(end) as i64,
        }
    }

    pub fn tame_values(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.tame()).collect()
    }

    /// Rows of tame values, one in four with hostile ones among them.
    pub fn rows(&mut self, rows: usize, columns: usize) -> Rows {
        let mut drawn = Rows {
            values: Vec::with_capacity(rows * columns),
            tame: Vec::with_capacity(rows),
        };
        for _ in 0..rows {
            let tame = !self.one_in(4);
            drawn.values.extend((0..columns).map(|_| match tame {
                false if self.one_in(2) => self.hostile(),
                _ => self.tame(),
            }));
            drawn.tame.push(tame);
        }
        drawn
    }

    /// A tensor of these values, and what it holds of them. Now and then one of another shape or
    /// dtype.
    pub fn tensor<const D: usize>(
        &mut self,
        values: &[f32],
        shape: [usize; D],
        dtype: FloatDType,
    ) -> (Tensor<D>, Vec<f32>) {
        let (mut shape, mut dtype) = (shape, DType::from(dtype));
        let mut values = values.to_vec();
        match self.below(128) {
            127 => {
                self.spoilt = true;
                dtype = DType::F64;
            }
            126 => {
                self.spoilt = true;
                let dimension = self.below(D);
                shape[dimension] = self.pick(&[shape[dimension] + 1, shape[dimension] / 2, 0]);
                values.resize(shape.iter().product(), 1.0);
            }
            _ => (),
        }
        let data = TensorData::new(values, shape).convert_dtype(dtype);
        let tensor = Tensor::from_data(data, (&Device::flex(), dtype));
        let held = match dtype {
            DType::F64 => Vec::new(),
            _ => read(&tensor),
        };
        (tensor, held)
    }

    /// Puts hostile values into one in four of so many rows, and says which have none.
    pub fn spoil_rows(&mut self, values: &mut [f32], rows: usize) -> Vec<bool> {
        let columns = values.len().checked_div(rows).unwrap_or(0);
        let drawn = self.rows(rows, columns);
        for row in (0..rows).filter(|row| !drawn.tame[*row]) {
            let slots = row * columns..(row + 1) * columns;
            values[slots.clone()].copy_from_slice(&drawn.values[slots]);
        }
        drawn.tame
    }

    /// The same tensor, now and then of another shape or dtype.
    pub fn again<const D: usize>(&mut self, tensor: &Tensor<D>) -> Tensor<D> {
        let dtype = tensor.dtype().into();
        self.tensor(&read(tensor), tensor.dims(), dtype).0
    }

    /// A tensor of integers of a dtype that holds them, now and then one of another shape.
    pub fn integers<const D: usize>(
        &mut self,
        values: &[i64],
        mut shape: [usize; D],
    ) -> Tensor<D, Int> {
        let dtype = self.pick(&[DType::I32, DType::I64]);
        let mut values = values.to_vec();
        if self.one_in(128) {
            self.spoilt = true;
            let dimension = self.below(D);
            shape[dimension] += 1;
            values.resize(shape.iter().product(), 0);
        }
        let data = TensorData::new(values, shape).convert_dtype(dtype);
        Tensor::from_data(data, (&Device::flex(), dtype))
    }

    /// What an operator gives for arguments that fit. It must take those, and no others.
    ///
    /// # Panics
    ///
    /// If it does otherwise.
    #[track_caller]
    pub fn settle<T>(&self, result: Result<T, OpError>, fits: bool) -> Option<T> {
        match result {
            Err(error) => {
                assert!(!fits || self.spoilt, "refused: {error}");
                None
            }
            Ok(_) if self.spoilt => None,
            Ok(value) => {
                assert!(fits, "taken, and does not fit");
                Some(value)
            }
        }
    }
}
