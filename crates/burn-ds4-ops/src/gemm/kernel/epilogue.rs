//! What becomes of a lane's sums of a tile.

use cubecl::prelude::*;

use super::activation::swiglu;
use super::input::{padded_columns, permuted_column, term_of};
use super::weights::WeightFormat;
use crate::caps::Target;

/// The result of a gate, times the score of the pair if there are scores.
#[cube]
pub(super) fn gated_value(
    gate: f32,
    up: f32,
    limit: f32,
    scores: &ComptimeOption<Box<[f32]>>,
    pair: u32,
    #[comptime] target: Target,
) -> f32 {
    let mut score = 1.0f32;
    #[comptime]
    if let ComptimeOption::Some(scores) = scores {
        score = scores[pair as usize];
    }
    swiglu(gate, up, limit, target) * score
}

/// Results of a row: `own`, and `own + 8` without a gate, of `outputs`.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Results {
    pub row: u32,
    pub own: u32,
    pub outputs: u32,
}

#[cube]
impl Results {
    /// Writes a gated result to `[rows, terms, outputs]`, in the order of [`permuted_column`] for
    /// weights of `next`. A value rounded to `R`, the dtype of `x`, has as many terms as `x`.
    pub fn write_gated<R: Float, Y: Float>(
        &self,
        output: &mut [Y],
        value: f32,
        #[comptime] terms: u32,
        #[comptime] next: WeightFormat,
    ) {
        let value = f32::cast_from(R::cast_from(value));
        let width = padded_columns(self.outputs, next) as usize;
        #[unroll]
        for term in 0..terms {
            let row_start = (self.row * terms + term) as usize * width;
            output[row_start + permuted_column(self.own, next) as usize] =
                Y::cast_from(f32::reinterpret(term_of(value, term)));
        }
    }

    /// Writes both results to `[rows, outputs]`, where there are such.
    pub fn write<Y: Float>(&self, output: &mut [Y], low: f32, high: f32) {
        let row_start = self.row as usize * self.outputs as usize;
        if self.own < self.outputs {
            output[row_start + self.own as usize] = Y::cast_from(low);
        }
        if self.own + 8 < self.outputs {
            output[row_start + self.own as usize + 8] = Y::cast_from(high);
        }
    }
}
