use cubecl::prelude::*;

/// Sorts the first `size` entries, a power of two, by rank, of equal ones by id, in a bitonic
/// network. Every unit of the cube, which has `units`, must call this after a barrier. Another one
/// follows the last exchange.
#[cube]
pub(crate) fn sort(
    ranks: &mut Shared<[u32]>,
    ids: &mut Shared<[u32]>,
    size: u32,
    #[comptime] units: u32,
) {
    let mut run = 2u32;
    while run <= size {
        let mut distance = run / 2;
        while distance > 0 {
            let mut pair = UNIT_POS;
            while pair < size / 2 {
                let low = 2 * pair - (pair & (distance - 1));
                // Runs alternate between ascending and descending. The last one is ascending.
                order(ranks, ids, low, low + distance, low & run == 0);
                pair += units;
            }
            sync_cube();
            distance /= 2;
        }
        run *= 2;
    }
}

#[cube]
fn order(ranks: &mut Shared<[u32]>, ids: &mut Shared<[u32]>, low: u32, high: u32, ascends: bool) {
    let (low, high) = (low as usize, high as usize);
    let (rank, other_rank) = (ranks[low], ranks[high]);
    let (id, other_id) = (ids[low], ids[high]);
    let is_after = rank > other_rank || (rank == other_rank && id > other_id);
    // CUDA C++ has no comparison of two conditions.
    if (is_after && ascends) || !(is_after || ascends) {
        ranks[low] = other_rank;
        ranks[high] = rank;
        ids[low] = other_id;
        ids[high] = id;
    }
}
