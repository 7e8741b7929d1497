//! All that a step does to rows before its queries attend, side by side.

use cubecl::prelude::*;

use super::append::{AppendSizes, append};
use super::compress::{CompressBlueprint, Compressor, compress};
use super::rotate::Table;
use super::row::RowBlueprint;
use crate::norm::{NormSizes, RmsNormBlueprint, normalize_rows};

/// How [`step_kernel`] is compiled. Cubes of all parts have as many planes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StepBlueprint {
    pub norm: RmsNormBlueprint,
    pub append: RowBlueprint,
    pub compressed: Option<CompressBlueprint>,
    pub indexed: Option<CompressBlueprint>,
}

impl StepBlueprint {
    /// Cubes of a sequence that compress: the first ones, since they take longest.
    pub(crate) const fn compressing(self) -> u32 {
        self.compressed.is_some() as u32 + self.indexed.is_some() as u32
    }
}

/// Normalises queries, and stores the key/value rows and the compressed rows of sequences. Cubes of a sequence: one for each compressor, one for each
/// new row that is kept, and as many for queries as all sequences need together, divided by the sequences.
#[cube(launch_unchecked, address_type = "dynamic")]
// What is known at compile time is asked by itself, so that the rest is left out.
#[allow(clippy::too_many_arguments, clippy::collapsible_if)]
pub(crate) fn step_kernel<F: Float, W: Float, R: Float, I: Int, N: Size, M: Size>(
    angles: &[f32],
    start: &[I],
    queries: &[Vector<F, N>],
    queries_norm: ComptimeOption<&[Vector<W, M>]>,
    normed: &mut [Vector<F, N>],
    x: &[F],
    norm: &[W],
    ring: &mut [R],
    compressed: ComptimeOption<Compressor<R, W>>,
    indexed: ComptimeOption<Compressor<R, W>>,
    norm_sizes: NormSizes,
    append_sizes: AppendSizes,
    kept: u32,
    table: Table,
    #[comptime] blueprint: StepBlueprint,
    #[define(F, W, R, I)] _dtypes: [ElemType; 4],
) {
    let sequence = CUBE_POS_Y as usize;
    if comptime!(blueprint.compressed.is_some()) {
        if CUBE_POS_X == 0 {
            let mut compressor = compressed.unwrap();
            let own = comptime!(blueprint.compressed.unwrap());
            compress::<R, W, I>(&mut compressor, angles, start, sequence, &table, own);
        }
    }
    let compressing = comptime!(blueprint.compressing());
    if comptime!(blueprint.indexed.is_some()) {
        if CUBE_POS_X == comptime!(compressing - 1) {
            let mut compressor = indexed.unwrap();
            let own = comptime!(blueprint.indexed.unwrap());
            compress::<R, W, I>(&mut compressor, angles, start, sequence, &table, own);
        }
    }
    if CUBE_POS_X >= compressing {
        let cube = CUBE_POS_X - compressing;
        if cube < kept {
            append::<F, R, W, I>(
                x,
                norm,
                angles,
                start,
                ring,
                sequence,
                cube,
                &append_sizes,
                &table,
                blueprint.append,
            );
        } else {
            let of_sequence = CUBE_COUNT_X - compressing - kept;
            normalize_rows::<F, W, N, M>(
                queries,
                queries_norm,
                normed,
                CUBE_POS_Y * of_sequence + (cube - kept),
                &norm_sizes,
                blueprint.norm,
            );
        }
    }
}
