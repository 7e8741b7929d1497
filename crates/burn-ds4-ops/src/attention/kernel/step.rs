//! Everything that a step does to rows before its queries attend, in one launch.

use cubecl::prelude::*;

use super::append::{Appender, append};
use super::compress::{CompressBlueprint, Compressor, compress};
use super::pages::PageTable;
use super::rotate::Positions;
use super::row::RowBlueprint;
use crate::comptime_option::ComptimeOption;
use crate::norm::{NormSizes, RmsNormBlueprint, normalize_rows};

/// Compile-time configuration of [`step_kernel`]. The cubes of all parts have the same number of
/// planes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StepBlueprint {
    pub norm: RmsNormBlueprint,
    pub append: RowBlueprint,
    pub compressed: Option<CompressBlueprint>,
    pub indexed: Option<CompressBlueprint>,
}

impl StepBlueprint {
    /// Cubes of a sequence that run compressors. They come first, since they take longest.
    pub(crate) const fn compressor_cubes(self) -> u32 {
        self.compressed.is_some() as u32 + self.indexed.is_some() as u32
    }
}

/// Queries before and after their norm.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct StepQueries<F: Float, N: Size> {
    pub x: Box<[Vector<F, N>]>,
    pub normed: Box<[Vector<F, N>]>,
    pub sizes: NormSizes,
}

/// Normalises queries, and stores the key/value rows and the compressed rows of sequences.
///
/// A sequence has one cube for each compressor, one for each new row that is stored, and some for
/// queries: as many as all queries need, divided by the number of sequences.
#[cube(launch_unchecked, address_type = "dynamic")]
// A condition on comptime values gets an `if` of its own, so that its branch is not compiled.
#[allow(clippy::collapsible_if)]
pub(crate) fn step_kernel<F: Float, W: Float, R: Float, I: Int, N: Size, M: Size>(
    positions: &Positions<I>,
    pages: &ComptimeOption<PageTable>,
    queries: &mut StepQueries<F, N>,
    queries_norm: ComptimeOption<&[Vector<W, M>]>,
    appender: &mut Appender<F, R, W>,
    compressed: ComptimeOption<Compressor<R, W>>,
    indexed: ComptimeOption<Compressor<R, W>>,
    #[comptime] blueprint: StepBlueprint,
    #[define(F, R, W, I)] _dtypes: [ElemType; 4],
) {
    let sequence = CUBE_POS_Y as usize;
    if comptime!(blueprint.compressed.is_some()) {
        if CUBE_POS_X == 0 {
            let mut compressor = compressed.unwrap();
            let own = comptime!(blueprint.compressed.unwrap());
            compress::<R, W, I>(&mut compressor, positions, pages, sequence, 0u32, own);
        }
    }
    let compressor_cubes = comptime!(blueprint.compressor_cubes());
    if comptime!(blueprint.indexed.is_some()) {
        if CUBE_POS_X == comptime!(compressor_cubes - 1) {
            let mut compressor = indexed.unwrap();
            let own = comptime!(blueprint.indexed.unwrap());
            compress::<R, W, I>(&mut compressor, positions, pages, sequence, 0u32, own);
        }
    }
    if CUBE_POS_X >= compressor_cubes {
        let cube = CUBE_POS_X - compressor_cubes;
        let stored = appender.sizes.stored;
        if cube < stored {
            append::<F, R, W, I>(appender, positions, sequence, cube, blueprint.append);
        } else {
            let of_sequence = CUBE_COUNT_X - compressor_cubes - stored;
            normalize_rows::<F, W, N, M>(
                &queries.x,
                queries_norm,
                &mut queries.normed,
                CUBE_POS_Y * of_sequence + (cube - stored),
                &queries.sizes,
                blueprint.norm,
            );
        }
    }
}
