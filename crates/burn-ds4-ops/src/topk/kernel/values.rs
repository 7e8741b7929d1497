use cubecl::prelude::*;

use super::row::{LogitRows, TopkIds};
use super::window::Window;
use crate::comptime_option::ComptimeOption;
use crate::select::key::{NONE, key_of};
use crate::select::sort;

/// How [`values_kernel`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ValuesBlueprint {
    /// Slots that are sorted: the power of two that holds `k`, or 0 to leave them in their order.
    pub sorted: u32,
    /// Units of a cube.
    pub units: u32,
}

/// The values at some columns, and these columns: `[rows, k]`.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct TopkValues<F: Float> {
    values: Box<[F]>,
    ids: Box<[i32]>,
}

/// Collects the values at the columns of each row, with one cube for each row; sorted by (value
/// descending, column ascending) if `sorted` is not 0.
///
/// - `starts`: those of the windows, see [`WindowArgs`](super::window::WindowArgs)
/// - `none`: the value in slots without a column
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn values_kernel<F: Float, I: Int>(
    rows: u32,
    logits: &LogitRows<F>,
    starts: ComptimeOption<&[I]>,
    chosen: &TopkIds,
    output: &mut TopkValues<F>,
    none: f32,
    #[comptime] blueprint: ValuesBlueprint,
    #[define(F, I)] _dtypes: [ElemType; 2],
) {
    let row = CUBE_POS as u32;
    let k = chosen.k;
    if row < rows {
        let mut start = 0u32;
        #[comptime]
        if let ComptimeOption::Some(starts) = starts {
            start = Window::bound::<I>(starts[row as usize], logits.columns);
        }
        // A window that begins at the end of the row has no ids. The element that is read instead
        // has to exist, too.
        let first = row as usize * logits.stride + min(start, logits.columns - 1) as usize;
        let out = row as usize * k as usize;
        if comptime!(blueprint.sorted == 0) {
            let mut slot = UNIT_POS;
            while slot < k {
                let id = chosen.ids[out + slot as usize];
                output.values[out + slot as usize] = value_of(logits, first, id, none);
                output.ids[out + slot as usize] = id;
                slot += blueprint.units;
            }
        } else {
            let mut ranks = Shared::<[u32]>::new_slice(comptime!(blueprint.sorted as usize));
            let mut slot_ids = Shared::<[u32]>::new_slice(comptime!(blueprint.sorted as usize));
            let mut slot = UNIT_POS;
            while slot < blueprint.sorted {
                let id = if slot < k {
                    chosen.ids[out + slot as usize]
                } else {
                    -1i32
                };
                let key = key_of(f32::cast_from(value_of(logits, first, id, none)));
                // Slots without an entry come last.
                ranks[slot as usize] = !select(id < 0, NONE, key);
                slot_ids[slot as usize] = u32::reinterpret(id);
                slot += blueprint.units;
            }
            sync_cube();
            let size = comptime!(blueprint.sorted).runtime();
            sort(&mut ranks, &mut slot_ids, size, blueprint.units);
            let mut slot = UNIT_POS;
            while slot < k {
                let id = i32::reinterpret(slot_ids[slot as usize]);
                output.values[out + slot as usize] = value_of(logits, first, id, none);
                output.ids[out + slot as usize] = id;
                slot += blueprint.units;
            }
        }
    }
}

#[cube]
fn value_of<F: Float>(logits: &LogitRows<F>, first: usize, id: i32, none: f32) -> F {
    let value = logits.elements[first + max(id, 0i32) as usize];
    select(id < 0, F::cast_from(none), value)
}
