//! How the kernel is compiled, and its operands.

use cubecl::prelude::*;

use crate::caps::Target;
use crate::gemm::kernel::weights::WeightFormat;
use crate::warpgroup::WARPGROUP;

/// What the rows of `x` consist of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum RowFormat {
    Bf16,
    F16,
}

/// How the operands of [`wgmma_kernel`](super::wgmma_kernel) are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WgmmaOperands {
    /// FP4, for which the columns of `x` are permuted, FP8, or as `x`.
    pub weights: WeightFormat,
    pub x: RowFormat,
}

impl WgmmaOperands {
    /// Columns of `x` and of weights in a stage: 128, or 64.
    pub const fn k_block(self) -> u32 {
        self.row_chunks() * self.weights.columns()
    }

    /// Chunks of 16 bytes of a row of weights in a stage.
    pub(super) const fn row_chunks(self) -> u32 {
        // As many as a swizzle spans where products read them from shared memory.
        if self.shares_weights() { 8 } else { 4 }
    }

    /// Whether products read weights from shared memory.
    pub(super) const fn shares_weights(self) -> bool {
        matches!(self.weights, WeightFormat::Dense)
    }

    /// Shared memory of a stage, with its barriers.
    pub const fn stage_bytes(self, warpgroups: u32, columns: u32) -> usize {
        let rows = 64 * warpgroups;
        let x = columns * self.x_tiles() * ROW_BYTES;
        let weights = rows * self.row_chunks() * 16;
        (x + weights + rows * self.row_scales() * 4 + 24) as usize
    }

    /// Words of scales of a row of weights in a stage.
    pub(super) const fn row_scales(self) -> u32 {
        match self.weights {
            WeightFormat::Fp8Blocks32 => self.k_block() / self.weights.fp8_block(),
            _ => 1,
        }
    }

    /// Tiles of `x` in a stage, of 128 bytes of a row each.
    pub(super) const fn x_tiles(self) -> u32 {
        self.k_block() * 2 / ROW_BYTES
    }
}

/// Bytes of a row of a tile of `x`, the span of the swizzle.
pub(super) const ROW_BYTES: u32 = 128;
/// How [`wgmma_kernel`](super::wgmma_kernel) is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WgmmaBlueprint {
    pub operands: WgmmaOperands,
    /// Warpgroups that multiply, 64 rows of weights each: 2, or 3 for tiles of at most 128 rows of
    /// `x`. One more copies.
    pub warpgroups: u32,
    /// Rows of `x` of a tile, which are columns of the product: a multiple of 32, at most 256.
    pub columns: u32,
    /// Stages of [`WgmmaOperands::k_block`] columns of `x` and of weights.
    pub stages: u32,
    /// Half of the rows are a gate, whose activation is multiplied by the other half and by the
    /// score. The result is in the order for weights of this format.
    pub gated: Option<WeightFormat>,
    /// Whether pairs are sorted into groups.
    pub sorted: bool,
    /// Whether `x` has a row for each position in the order of groups.
    pub by_position: bool,
    /// Whether the scales of 128 columns of FP4 are a word. Those of FP8 always are words.
    pub scale_words: bool,
    /// Whether outputs are written eight at a time.
    pub vectors: bool,
    pub target: Target,
}

impl WgmmaBlueprint {
    pub const fn units(self) -> u32 {
        WARPGROUP * (1 + self.warpgroups)
    }

    /// Rows of weights of a tile.
    pub const fn rows(self) -> u32 {
        64 * self.warpgroups
    }

    /// Outputs of a tile.
    pub const fn outputs(self) -> u32 {
        if self.gated.is_some() {
            self.rows() / 2
        } else {
            self.rows()
        }
    }

    /// Registers of a unit that copies, and of one that multiplies. All of a cube's together are no
    /// more than it starts with: 168 for each of 384 units, 128 for each of 512.
    pub(super) const fn registers(self) -> [u32; 2] {
        match (self.warpgroups, self.gathers()) {
            (2, false) => [40, 232],
            (2, true) => [56, 224],
            (_, false) => [56, 152],
            (_, true) => [80, 144],
        }
    }

    /// Whether units that copy give registers to those that multiply.
    pub(super) const fn moves_registers(self) -> bool {
        !matches!(self.format(), WeightFormat::Dense) || self.columns > 128
    }

    pub(super) const fn multiplying_planes(self) -> u32 {
        self.warpgroups * WARPGROUP / 32
    }

    pub(super) const fn format(self) -> WeightFormat {
        self.operands.weights
    }

    pub(super) const fn dtype(self) -> &'static str {
        match self.operands.x {
            RowFormat::Bf16 => "bf16",
            RowFormat::F16 => "f16",
        }
    }

    /// Whether the rows of `x` of a tile are not next to each other, or its rows of weights are
    /// more than two runs.
    pub(super) const fn gathers(self) -> bool {
        (self.sorted && !self.by_position) || matches!(self.gated, Some(WeightFormat::Fp4(_)))
    }

    /// Boxes of rows of weights of a stage. With a gate, the gates come first.
    pub const fn weight_boxes(self) -> u32 {
        if self.gated.is_some() && !self.gathers() {
            2
        } else {
            1
        }
    }

    /// The rows of a stage from the lower row of a lane to the upper one.
    pub(super) const fn row_distance(self) -> u32 {
        if self.weight_boxes() == 2 {
            self.rows() / 2
        } else {
            8
        }
    }

    /// Units that copy to a stage: one has the boxes, and all have scales and rows of `x` that are
    /// gathered.
    pub(super) const fn copying_units(self) -> u32 {
        if self.scale_words || self.gathers() {
            WARPGROUP
        } else {
            1
        }
    }

    /// Rows of `x` of which a unit copies a chunk of each tile, if they are gathered.
    pub(super) const fn unit_rows(self) -> u32 {
        self.columns * 8 / WARPGROUP
    }

    /// Rows of weights of which a unit copies a chunk, if rows of `x` are gathered.
    pub(super) const fn unit_weight_rows(self) -> u32 {
        self.rows() * self.operands.row_chunks() / WARPGROUP
    }

    /// Rows of weights of which a unit copies the scales, at most.
    pub(super) const fn unit_scales(self) -> u32 {
        self.rows().div_ceil(WARPGROUP)
    }

    /// Parts of 32 columns of a stage, whose products are a group.
    pub(super) const fn parts(self) -> usize {
        self.operands.k_block() as usize / 32
    }

    /// Words of codes of a lane in a part.
    pub(super) const fn part_codes(self) -> usize {
        if self.permuted() { 2 } else { 8 }
    }

    /// Rows of `x` of a smaller product, which a group with no more takes.
    pub(super) const fn few_columns(self) -> u32 {
        self.columns * 3 / 4
    }

    pub(super) const fn permuted(self) -> bool {
        self.format().is_fp4()
    }
}

/// Both operands in words.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct WgmmaBoxes {
    /// `[rows of each matrix, matrices, words]`, in boxes of the rows of a tile by 128 bytes.
    pub x: TensorMap<u32, Tiled>,
    /// `[rows of all matrices, words]`, in boxes of the rows of a tile, or of half of them.
    pub weights: TensorMap<u32, Tiled>,
}

/// The rows of the other operand.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct WgmmaRows {
    /// Where they are gathered.
    pub words: Box<[Vector<u32, Const<4>>]>,
    /// Vectors from one row to the next.
    pub vectors: u32,
}

/// What the number of columns of a gated result is a multiple of, by the weights that it is for.
pub(crate) const fn hidden_block(weights: WeightFormat) -> u32 {
    let x = RowFormat::Bf16;
    WgmmaOperands { weights, x }.k_block()
}
