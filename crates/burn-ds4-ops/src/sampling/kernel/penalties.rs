//! Penalties for tokens that have occurred, and logit bias.

use cubecl::prelude::*;

use super::super::layout::{
    BIAS, BIAS_ID, BIASES, FREQUENCY, PENALISED, PRESENCE, PROMPT, REPETITION,
};
use super::lanes::LaneTables;

/// How [`penalties_kernel`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PenaltyBlueprint {
    /// Units of a cube, and columns of a unit: at most 32.
    pub units: u32,
    pub columns: u32,
}

/// Sizes and strides of logits and counts.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct PenaltyShape {
    pub columns: u32,
    /// Rows of a lane, one more than it has drafts.
    pub lane_rows: u32,
    pub logits_row: usize,
    pub counts_row: usize,
    /// 0, which compilers do not know.
    pub zero: u32,
}

/// The drafts before a row.
#[derive(CubeType)]
struct RowDrafts<'a, I: Int> {
    drafts: &'a [I],
    first: usize,
    pub count: u32,
    columns: u32,
}

#[cube]
impl<'a, I: Int> RowDrafts<'a, I> {
    fn new(drafts: &'a [I], first: usize, count: u32, columns: u32) -> RowDrafts<'a, I> {
        RowDrafts::<'a, I> {
            drafts,
            first,
            count,
            columns,
        }
    }

    /// The column of a draft, or one after the last.
    fn column(&self, index: u32) -> u32 {
        let draft = self.drafts[self.first + index as usize];
        // Compared in the dtype of the drafts, as a wider integer may be out of the range of a
        // column.
        let is_column = draft >= I::from_int(0) && draft < I::cast_from(self.columns);
        select(is_column, u32::cast_from(draft), self.columns)
    }

    /// How many of the first `count` drafts are `id`.
    fn among_first(&self, count: u32, id: u32) -> u32 {
        let mut among = 0u32;
        for index in 0..count {
            among += select(self.column(index) == id, 1u32, 0u32);
        }
        among
    }
}

/// What changes a row of logits.
#[derive(CubeType)]
struct PenalisedRow<'a, I: Int> {
    tables: &'a LaneTables,
    drafts: &'a RowDrafts<'a, I>,
    lane: u32,
    biases: u32,
    zero: u32,
}

#[cube]
impl<'a, I: Int> PenalisedRow<'a, I> {
    fn new(
        tables: &'a LaneTables,
        drafts: &'a RowDrafts<'a, I>,
        lane: u32,
        zero: u32,
    ) -> PenalisedRow<'a, I> {
        PenalisedRow::<'a, I> {
            tables,
            drafts,
            lane,
            biases: tables.word(lane, BIASES),
            zero,
        }
    }

    /// A product that is rounded: with an integer operation after it, no compiler fuses it with a
    /// sum.
    fn product(&self, a: f32, b: f32) -> f32 {
        f32::reinterpret(u32::reinterpret(a * b) + self.zero)
    }

    /// The logit of a token that has occurred, from its logit and its count before the drafts.
    fn penalised(&self, logit: f32, id: u32, count: u32) -> f32 {
        let mut logit = logit;
        for entry in 0..self.biases {
            if self.tables.word_at(self.lane, BIAS_ID, entry) == id {
                logit += self.tables.float_at(self.lane, BIAS, entry);
            }
        }
        let repetition = self.tables.float(self.lane, REPETITION);
        let product = self.product(logit, repetition);
        logit = select(logit > 0.0f32, logit / repetition, product);
        let count =
            (count & comptime!(PROMPT - 1)) + self.drafts.among_first(self.drafts.count, id);
        if count > 0 {
            let frequency = self.tables.float(self.lane, FREQUENCY);
            logit -= self.product(frequency, f32::cast_from(count));
            logit -= self.tables.float(self.lane, PRESENCE);
        }
        logit
    }
}

/// Changes the logits of tokens that have occurred or have a bias. The columns of row `CUBE_POS_Y`
/// are divided among cubes, which end at once where the parameters of its lane change nothing.
///
/// A logit is read and written by one unit alone: by that of its column if its token is counted,
/// else by that of its first draft, else by that of its bias.
///
/// - `logits`: `[lanes · rows, columns]`
/// - `counts`: `[lanes, columns]`
/// - `drafts`: `[lanes, rows - 1]`
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn penalties_kernel<I: Int>(
    logits: &mut [f32],
    counts: &[i32],
    drafts: &[I],
    tables: LaneTables,
    shape: PenaltyShape,
    #[comptime] blueprint: PenaltyBlueprint,
    #[define(I)] _dtype: ElemType,
) {
    let PenaltyBlueprint { units, columns } = comptime!(blueprint);
    let lane = CUBE_POS_Y / shape.lane_rows;
    let is_penalised = tables.word(lane, PENALISED) > 0;
    let biases = tables.word(lane, BIASES);
    let own = CUBE_POS_Y as usize * shape.logits_row;
    let counted = lane as usize * shape.counts_row;
    let first = CUBE_POS_X * comptime!(units * columns);
    let end = min(first + comptime!(units * columns), shape.columns);
    let draft_count = CUBE_POS_Y % shape.lane_rows;
    let first_draft = (lane * (shape.lane_rows - 1)) as usize;
    let drafts = RowDrafts::<I>::new(drafts, first_draft, draft_count, shape.columns);
    let row = PenalisedRow::<I>::new(&tables, &drafts, lane, shape.zero);
    if is_penalised {
        // All counts are read before any logit is written.
        let mut occurred = 0u32;
        #[unroll]
        for i in 0..columns {
            let id = first + i * units + UNIT_POS;
            // Beyond the end, the last one is read again and not used.
            let count = counts[counted + min(id, shape.columns - 1) as usize];
            occurred |= select(id < end && count != 0, comptime!(1u32 << i), 0u32);
        }
        for i in 0..columns {
            if ((occurred >> i) & 1) == 1 {
                let id = first + i * units + UNIT_POS;
                let at = own + id as usize;
                let count = u32::cast_from(counts[counted + id as usize]);
                logits[at] = row.penalised(logits[at], id, count);
            }
        }
        let mut index = UNIT_POS;
        while index < draft_count {
            let id = drafts.column(index);
            if id >= first && id < end && drafts.among_first(index, id) == 0 {
                let count = counts[counted + id as usize];
                if count == 0 {
                    let at = own + id as usize;
                    logits[at] = row.penalised(logits[at], id, 0u32);
                }
            }
            index += units;
        }
    }
    let mut entry = UNIT_POS;
    while entry < biases {
        let id = tables.word_at(lane, BIAS_ID, entry);
        if id >= first && id < end {
            let mut is_done = false;
            if is_penalised {
                let count = counts[counted + id as usize];
                is_done = count != 0 || drafts.among_first(draft_count, id) > 0;
            }
            if !is_done {
                let at = own + id as usize;
                logits[at] += tables.float_at(lane, BIAS, entry);
            }
        }
        entry += units;
    }
}

/// Counts new tokens of each lane, with one unit for each lane.
///
/// - `counts`: `[lanes, columns]`
/// - `tokens`: `[lanes, count]`
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn count_kernel<I: Int>(
    counts: &mut [i32],
    tokens: &[I],
    lanes: u32,
    count: u32,
    columns: u32,
    counts_row: usize,
    #[define(I)] _dtype: ElemType,
) {
    let lane = CUBE_POS as u32 * CUBE_DIM + UNIT_POS;
    if lane < lanes {
        for i in 0..count {
            let token = tokens[(lane * count + i) as usize];
            // Compared in the dtype of the tokens, as a wider integer may be out of the range of a
            // column.
            if token >= I::from_int(0) && token < I::cast_from(columns) {
                counts[lane as usize * counts_row + usize::cast_from(token)] += 1;
            }
        }
    }
}
