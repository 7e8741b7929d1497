use cubecl::prelude::*;

use super::blueprint::FewBlueprint;
use super::decode::Format;
use crate::intrinsics::Target;

/// Sizes of a stack of matrices.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Stack {
    /// Rows and columns of a matrix.
    pub rows: u32,
    pub columns: u32,
    /// Scales of a row (FP4), or of a row of blocks (FP8).
    pub line_scales: u32,
    /// From one matrix's scales to the next's, in bytes (FP4) or words (FP8).
    pub matrix_scales: usize,
    /// Rows of a part, with which blocks (FP8) begin anew; 0 where they would without it.
    pub part_rows: u32,
}

#[cube]
impl Stack {
    /// Where the scales of a row begin, counted from those of the matrix.
    pub fn row_scales(&self, row: u32, #[comptime] format: Format) -> usize {
        let mut line = row;
        if comptime!(format == Format::Fp8) {
            line = row / 128;
            // Divisions by what is known at run time take longer than decoding what the row has for a lane.
            if self.part_rows > 0 {
                let part_blocks = (self.part_rows + 127) / 128;
                line = row / self.part_rows * part_blocks + row % self.part_rows / 128;
            }
        }
        line as usize * self.line_scales as usize
    }
}

/// The weights of a stack of matrices, as kernels for tensor cores read them.
#[derive(CubeType)]
pub(crate) struct Weights<'a, S: Size> {
    pub words: &'a [Vector<u32, Const<4>>],
    pub scales: &'a [Vector<u32, S>],
    pub stack: Stack,
    #[cube(comptime)]
    pub format: Format,
    /// Whether the columns are a multiple of a stretch, or whatever is read at a time.
    #[cube(comptime)]
    pub even: bool,
    #[cube(comptime)]
    pub target: Target,
}

/// Where the two rows of a lane start: in vectors of words; in bytes (FP4) or words (FP8) of scales.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Tile {
    pub low: usize,
    pub high: usize,
    pub low_scale: usize,
    pub high_scale: usize,
}

#[cube]
impl<'a, S: Size> Weights<'a, S> {
    pub fn new(
        words: &'a [Vector<u32, Const<4>>],
        scales: &'a [Vector<u32, S>],
        stack: Stack,
        #[comptime] format: Format,
        #[comptime] even: bool,
        #[comptime] target: Target,
    ) -> Weights<'a, S> {
        Weights::<'a, S> {
            words,
            scales,
            stack,
            format,
            even,
            target,
        }
    }

    /// As kernels for a few rows read them.
    pub fn of_few(
        words: &'a [Vector<u32, Const<4>>],
        scales: &'a [Vector<u32, S>],
        stack: Stack,
        #[comptime] blueprint: FewBlueprint,
    ) -> Weights<'a, S> {
        Weights::<'a, S>::new(
            words,
            scales,
            stack,
            blueprint.columns.format,
            blueprint.even,
            blueprint.target,
        )
    }

    /// Two rows of a matrix; past the end the last one.
    pub fn tile(&self, matrix: u32, low: u32, high: u32) -> Tile {
        let low = min(low, self.stack.rows - 1);
        let high = min(high, self.stack.rows - 1);
        let vectors = (self.stack.columns / comptime!(self.format.columns())) as usize;
        let first = matrix as usize * self.stack.rows as usize;
        let scales = matrix as usize * self.stack.matrix_scales;
        Tile {
            low: (first + low as usize) * vectors,
            high: (first + high as usize) * vectors,
            low_scale: scales + self.stack.row_scales(low, self.format),
            high_scale: scales + self.stack.row_scales(high, self.format),
        }
    }

    /// The 16 bytes of a row at `column`; zeros past the end.
    pub fn vector(&self, row: usize, column: u32) -> Vector<u32, Const<4>> {
        let vector = column / comptime!(self.format.columns());
        if comptime!(self.even) {
            self.words[row + vector as usize]
        } else {
            let inside = column < self.stack.columns;
            let words = self.words[row + select(inside, vector, 0u32) as usize];
            select(inside, words, Vector::new(0u32))
        }
    }

    /// FP4: the byte with the scale of the 32 columns at `column`, a multiple of them; past the end that of the last ones.
    pub fn scale_byte(&self, row: usize, column: u32) -> usize {
        if comptime!(self.even) {
            row + (column / 32) as usize
        } else {
            let last = (self.stack.columns + 31) / 32 - 1;
            row + min(column / 32, last) as usize
        }
    }

    /// The word that has it, where words are read.
    pub fn scale_word(&self, row: usize, column: u32) -> u32 {
        self.scales[self.scale_byte(row, column) / 4].extract(0usize)
    }

    /// Where the word has it.
    pub fn scale_shift(&self, row: usize, column: u32) -> u32 {
        (self.scale_byte(row, column) % 4) as u32 * 8
    }

    /// FP8: the scale of the 128 columns that `column` is one of; past the end that of the last ones.
    pub fn scale(&self, row: usize, column: u32) -> f32 {
        let last = (self.stack.columns + 127) / 128 - 1;
        f32::reinterpret(self.scales[row + min(column / 128, last) as usize].extract(0usize))
    }
}
