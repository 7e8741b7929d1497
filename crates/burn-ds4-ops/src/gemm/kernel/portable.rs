//! The schedule for any device and any float dtype: a plane multiplies a row of weights by a few
//! rows of `x` at a time.

use cubecl::prelude::*;

use super::epilogue::gated_value;
use super::groups::{Groups, GroupsBlueprint, PairSizes, Pairing};
use super::weights::{MatrixStack, WeightFormat, fp4_value, fp8_value, plain_codes, scale_value};
use crate::caps::Target;
use crate::comptime_option::ComptimeOption;
use crate::intrinsics::group_sum;

/// Rows of `x` that are multiplied at a time, at most.
pub(crate) const X_ROWS: u32 = 4;

/// Planes of a cube, where it need not have more.
pub(crate) const PLANES: u32 = 4;

/// Rows of `x` of a cube, where all are multiplied by one matrix.
pub(crate) const CUBE_X_ROWS: u32 = 1024;

/// What happens to the products of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Role {
    /// Half of the rows are a gate: its activation is multiplied by the other half and by the
    /// pair's score.
    Gated,
    /// They are the result.
    Rows,
    /// Those of a token's pairs are summed in the order of slots.
    Sum,
}

/// How [`portable_kernel`] is compiled. No result depends on the number of rows of `x`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PortableBlueprint {
    pub format: WeightFormat,
    pub role: Role,
    /// Pairs at most, where each cube groups them for itself.
    pub pairs: Option<u32>,
    /// Rows of `x` that are multiplied at a time. Those that are not there are read nevertheless.
    pub x_rows: u32,
    pub plane: u32,
    pub planes: u32,
    pub target: Target,
}

impl PortableBlueprint {
    /// Planes of a cube: a few, or more where it has to have a unit for each pair.
    pub const fn planes_for(pairs: Option<u32>, plane: u32) -> u32 {
        match pairs {
            Some(pairs) if pairs / plane > PLANES => pairs / plane,
            _ => PLANES,
        }
    }

    /// How a cube groups its pairs.
    const fn groups(self) -> GroupsBlueprint {
        let (pairing, pairs) = match self.pairs {
            Some(pairs) => (Pairing::Ids, pairs),
            None => (Pairing::One, 1),
        };
        GroupsBlueprint {
            pairing,
            pairs,
            one_token: false,
            planes: None,
            target: self.target,
        }
    }

    /// Sums of pairs of a cube that sums those of tokens.
    const fn pair_sums(self) -> u32 {
        match (self.role, self.pairs) {
            (Role::Sum, Some(pairs)) => pairs * self.planes,
            _ => 1,
        }
    }

    /// Bytes of shared memory.
    pub const fn shared_bytes(self) -> usize {
        self.pair_sums() as usize * size_of::<f32>() + self.groups().shared_bytes()
    }
}

/// How pairs find their rows of `x` and their matrices.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Pairs<I: Int> {
    /// The matrix of every pair. Without ids and groups, all have the first.
    pub ids: ComptimeOption<Box<[I]>>,
    /// Where there are too many pairs for a cube to group them: the pairs group by group, and where
    /// each group starts.
    pub order: ComptimeOption<Box<[u32]>>,
    pub starts: ComptimeOption<Box<[u32]>>,
    pub count: u32,
    /// Pairs that have one row of `x`.
    pub per_row: u32,
    /// Pairs of a token.
    pub slots: u32,
}

/// What happens to the sums.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Epilogue {
    /// Factors of gated pairs.
    pub scores: ComptimeOption<Box<[f32]>>,
    /// What is added to the sums of a token's pairs: `[tokens, rows]`.
    pub addend: ComptimeOption<Box<[f32]>>,
    /// The limit of gates.
    pub limit: f32,
}

/// Multiplies rows of `x` by the rows of their matrices. Every plane has a row of weights, or a row
/// and its gate.
///
/// - `x`: rows of elements, `x_stride` from one to the next
/// - `output`: `[pairs, rows]`, `[pairs, rows / 2]` with gates, `[tokens, rows]` of sums
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn portable_kernel<X: Float, W: Numeric, I: Int, Y: Float>(
    x: &[X],
    x_stride: usize,
    pairs: &Pairs<I>,
    matrices: &MatrixStack<W>,
    epilogue: &Epilogue,
    output: &mut [Y],
    #[comptime] blueprint: PortableBlueprint,
    #[define(X, W, I, Y)] _dtypes: [ElemType; 4],
) {
    let gated = comptime!(blueprint.role == Role::Gated);
    let small = comptime!(blueprint.pairs.is_some());
    let layout = &matrices.layout;
    let outputs = if comptime!(gated) {
        layout.rows / 2
    } else {
        layout.rows
    };
    let own = CUBE_POS_X * blueprint.planes + UNIT_POS_Y;
    let row = min(own, outputs - 1);
    let mut pair_sums = Shared::<[f32]>::new_slice(comptime!(blueprint.pair_sums() as usize));
    let sizes = PairSizes {
        tokens: pairs.count,
        slots: 1u32.runtime(),
    };
    let groups = Groups::new::<I>(&pairs.ids, sizes, layout.count, blueprint.groups());

    let mut group = CUBE_POS_Y;
    let mut last = CUBE_POS_Y + 1;
    if comptime!(blueprint.role == Role::Sum) {
        group = 0u32;
        last = groups.count();
    } else if comptime!(small) {
        last = min(last, groups.count());
    }
    while group < last {
        // With one matrix, each cube has some of the rows of `x`.
        let mut matrix = 0u32;
        let mut start = group * CUBE_X_ROWS;
        let mut end = min((group + 1) * CUBE_X_ROWS, pairs.count);
        #[comptime]
        if let ComptimeOption::Some(starts) = &pairs.starts {
            matrix = group;
            start = starts[group as usize];
            end = starts[group as usize + 1];
        }
        if comptime!(small) {
            matrix = groups.expert(group);
            start = groups.start(group);
            end = start + groups.size(group, start);
        }
        while start < end {
            let x_rows = comptime!(blueprint.x_rows);
            let mut x_pairs = Array::<u32>::new(comptime!(x_rows as usize));
            let mut rows = Array::<usize>::new(comptime!(x_rows as usize));
            #[unroll]
            for t in 0..x_rows {
                let at = min(start + t, end - 1);
                let mut pair = at;
                #[comptime]
                if let ComptimeOption::Some(order) = &pairs.order {
                    pair = order[at as usize];
                }
                if comptime!(small) {
                    pair = groups.pair(0u32, at);
                }
                x_pairs[t as usize] = pair;
                rows[t as usize] = (pair / pairs.per_row) as usize * x_stride;
            }
            let mut sums = Array::<f32>::new(comptime!(2 * x_rows as usize));
            #[unroll]
            for i in 0..comptime!(2 * x_rows as usize) {
                sums[i] = 0.0f32;
            }
            add_products(x, &rows, matrices, matrix, row, 0u32, &mut sums, blueprint);
            if comptime!(gated) {
                let up = row + outputs;
                add_products(x, &rows, matrices, matrix, up, x_rows, &mut sums, blueprint);
            }
            #[unroll]
            for t in 0..x_rows {
                let low = group_sum(sums[t as usize], blueprint.plane, blueprint.target);
                let pair = x_pairs[t as usize];
                let mut value = low;
                if comptime!(gated) {
                    let up = sums[comptime!((t + x_rows) as usize)];
                    let up = group_sum(up, blueprint.plane, blueprint.target);
                    let scores = &epilogue.scores;
                    value = gated_value(low, up, epilogue.limit, scores, pair, blueprint.target);
                }
                if UNIT_POS_X == 0 && start + t < end {
                    if comptime!(blueprint.role == Role::Sum) {
                        pair_sums[(pair * blueprint.planes + UNIT_POS_Y) as usize] = value;
                    } else if own < outputs {
                        output[pair as usize * outputs as usize + own as usize] =
                            Y::cast_from(value);
                    }
                }
            }
            start += x_rows;
        }
        group += 1;
    }

    if comptime!(blueprint.role == Role::Sum) {
        sync_cube();
        let first = CUBE_POS_X * blueprint.planes;
        let tokens = pairs.count / pairs.slots;
        let mut at = UNIT_POS;
        while at < tokens * blueprint.planes {
            let token = at / blueprint.planes;
            let own = at % blueprint.planes;
            if first + own < outputs {
                let mut total = 0.0f32;
                for slot in 0..pairs.slots {
                    let pair = token * pairs.slots + slot;
                    if groups.has_expert(pair) {
                        total += pair_sums[(pair * blueprint.planes + own) as usize];
                    }
                }
                let offset = token as usize * outputs as usize + (first + own) as usize;
                #[comptime]
                if let ComptimeOption::Some(addend) = &epilogue.addend {
                    total += addend[offset];
                }
                output[offset] = Y::cast_from(total);
            }
            at += CUBE_DIM;
        }
    }
}

/// Adds a lane's products of a row of weights and a few rows of `x` to `sums`, from index `first`
/// on.
#[cube]
fn add_products<X: Float, W: Numeric>(
    x: &[X],
    rows: &Array<usize>,
    matrices: &MatrixStack<W>,
    matrix: u32,
    row: u32,
    #[comptime] first: u32,
    sums: &mut Array<f32>,
    #[comptime] blueprint: PortableBlueprint,
) {
    let format = comptime!(blueprint.format);
    let per_word = comptime!(format.codes());
    let stack = &matrices.layout;
    let row_words = (stack.columns + comptime!(per_word - 1)) / per_word;
    let row_start = (matrix as usize * stack.rows as usize + row as usize) * row_words as usize;
    let scale_start =
        matrix as usize * stack.scales_per_matrix + stack.scale_row_start(row, format, true);
    let mut at = UNIT_POS_X;
    while at < row_words {
        let word = matrices.words[row_start + at as usize];
        let codes = plain_codes::<W>(word, format);
        let column = at * per_word;
        let mut scale = 1.0f32;
        if comptime!(format.is_fp4()) {
            let offset = scale_start + (column / 32) as usize;
            let code =
                (matrices.scales[offset / 4].extract(0usize) >> ((offset % 4) as u32 * 8)) & 255;
            scale = scale_value(code);
        }
        if comptime!(format.is_fp8()) {
            let block = comptime!(format.fp8_block());
            scale = f32::reinterpret(
                matrices.scales[scale_start + (column / block) as usize].extract(0usize),
            );
        }
        #[unroll]
        for code in 0..per_word {
            if column + code < stack.columns {
                let weight = match comptime!(format) {
                    WeightFormat::Fp4(_) => fp4_value(codes >> (code * 4)) * scale,
                    WeightFormat::Fp8 | WeightFormat::Fp8Blocks32 => {
                        fp8_value(codes >> (code * 8)) * scale
                    }
                    WeightFormat::Dense => f32::cast_from(word),
                };
                #[unroll]
                for t in 0..comptime!(blueprint.x_rows) {
                    let value = f32::cast_from(x[rows[t as usize] + (column + code) as usize]);
                    sums[comptime!((first + t) as usize)] += weight * value;
                }
            }
        }
        at += blueprint.plane;
    }
}
