//! Weights as operands: what a stack of matrices is to a kernel, and how it is read and decoded.

mod decode;

use cubecl::prelude::*;
use cubecl::std::FastDivmod;

use crate::caps::Target;

pub(super) use decode::{
    K_STEPS, fp4_bf16x2, fp4_first_factor, fp4_second_factor, fp8_bf16x2, fp8_factor,
    fp8_first_factor, fp8_second_factor, is_rare_scale, rare_bits, weight_x2,
};
pub(crate) use decode::{WeightFormat, fp4_value, fp8_value, plain_codes, scale_value};

/// A stack of matrices in elements of `W`, and its scales; those of floats are not read.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct MatrixStack<W: CubePrimitive> {
    pub words: Box<[W]>,
    pub scales: Box<[Vector<u32, Const<1>>]>,
    pub layout: StackLayout,
}

/// Shape and strides of a stack of matrices.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct StackLayout {
    /// Number of matrices.
    pub count: u32,
    /// Rows and columns of a matrix.
    pub rows: u32,
    pub columns: u32,
    /// Scales of a row (FP4), or of a row of blocks (FP8).
    pub scales_per_row: u32,
    /// Distance between the scales of neighbouring matrices, in bytes (FP4) or words (FP8).
    pub scales_per_matrix: usize,
    /// Rows of a part, at whose start a new block (FP8) begins, and rows of its blocks.
    pub part_rows: FastDivmod<u32>,
    pub part_blocks: u32,
}

#[cube]
impl StackLayout {
    /// The first scale of a row, relative to the first one of the matrix.
    ///
    /// `in_parts` is false where parts are whole blocks anyway, which takes fewer instructions.
    pub fn scale_row_start(
        &self,
        row: u32,
        #[comptime] format: WeightFormat,
        #[comptime] in_parts: bool,
    ) -> usize {
        let block = comptime!(format.fp8_block());
        let scale_row = if comptime!(!format.is_fp8()) {
            row
        } else if comptime!(in_parts) {
            let (part, part_row) = self.part_rows.div_mod(row);
            part * self.part_blocks + part_row / block
        } else {
            row / block
        };
        scale_row as usize * self.scales_per_row as usize
    }
}

/// How [`WeightReader`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ReaderBlueprint {
    pub format: WeightFormat,
    /// Whether K is a multiple of the K-block, or of whatever is read at a time.
    pub k_aligned: bool,
    /// Whether all scales of a K-block of FP4 are read at once.
    pub scale_vectors: bool,
    /// Whether blocks of FP8 begin anew in [parts](StackLayout::part_rows) of the rows.
    pub in_parts: bool,
    pub target: Target,
}

/// Reads the weights of a stack of matrices for tensor cores.
#[derive(CubeType)]
pub(crate) struct WeightReader<'a> {
    pub words: &'a [Vector<u32, Const<4>>],
    pub scales: &'a [Vector<u32, Const<1>>],
    pub stack: &'a StackLayout,
    #[cube(comptime)]
    pub blueprint: ReaderBlueprint,
}

/// Where the two rows of a lane start: in vectors of words, and in bytes (FP4) or words (FP8) of
/// scales.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct TwoRows {
    pub low: usize,
    pub high: usize,
    pub low_scale: usize,
    pub high_scale: usize,
}

#[cube]
impl<'a> WeightReader<'a> {
    pub fn new(
        stack: &'a MatrixStack<Vector<u32, Const<4>>>,
        #[comptime] blueprint: ReaderBlueprint,
    ) -> WeightReader<'a> {
        WeightReader::<'a> {
            words: &stack.words[..],
            scales: &stack.scales[..],
            stack: &stack.layout,
            blueprint,
        }
    }

    /// The offsets of two rows of a matrix. A row past the end counts as the last one.
    pub fn two_rows(&self, matrix: u32, low: u32, high: u32) -> TwoRows {
        let low = min(low, self.stack.rows - 1);
        let high = min(high, self.stack.rows - 1);
        let vectors = (self.stack.columns / comptime!(self.blueprint.format.columns())) as usize;
        let (format, in_parts) = comptime!((self.blueprint.format, self.blueprint.in_parts));
        let first = matrix as usize * self.stack.rows as usize;
        let scales = matrix as usize * self.stack.scales_per_matrix;
        TwoRows {
            low: (first + low as usize) * vectors,
            high: (first + high as usize) * vectors,
            low_scale: scales + self.stack.scale_row_start(low, format, in_parts),
            high_scale: scales + self.stack.scale_row_start(high, format, in_parts),
        }
    }

    /// Reads the 16 bytes of a row at `column`; zeros past the end.
    pub fn vector(&self, row: usize, column: u32) -> Vector<u32, Const<4>> {
        let vector = column / comptime!(self.blueprint.format.columns());
        if comptime!(self.blueprint.k_aligned) {
            self.words[row + vector as usize]
        } else {
            let inside = column < self.stack.columns;
            let words = self.words[row + select(inside, vector, 0u32) as usize];
            select(inside, words, Vector::new(0u32))
        }
    }

    /// FP4: the index of the byte with the scale of the 32 columns at `column`, a multiple of 32.
    /// Past the end, that of the last columns.
    pub fn scale_byte(&self, row: usize, column: u32) -> usize {
        if comptime!(self.blueprint.k_aligned) {
            row + (column / 32) as usize
        } else {
            let last = (self.stack.columns + 31) / 32 - 1;
            row + min(column / 32, last) as usize
        }
    }

    /// Reads the word that has that byte, where scales are read by words.
    pub fn scale_word(&self, row: usize, column: u32) -> u32 {
        self.scales[self.scale_byte(row, column) / 4].extract(0usize)
    }

    /// The position of that byte in its word, in bits.
    pub fn scale_shift(&self, row: usize, column: u32) -> u32 {
        (self.scale_byte(row, column) % 4) as u32 * 8
    }

    /// FP8: the index of the scale of the block of columns that has `column`. Past the end, that of
    /// the last block.
    pub fn scale_index(&self, row: usize, column: u32) -> usize {
        let block = comptime!(self.blueprint.format.fp8_block());
        let last = (self.stack.columns + comptime!(block - 1)) / block - 1;
        row + min(column / block, last) as usize
    }
}
