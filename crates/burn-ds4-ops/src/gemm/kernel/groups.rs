use cubecl::prelude::*;

use crate::caps::Target;
use crate::comptime_option::ComptimeOption;
use crate::intrinsics::{ballot, plane_matches, plane_running_sum, plane_value};

/// The expert of a pair that has none.
const NONE: u32 = 0xffff_ffff;

/// Numbers of tokens, and of (token, slot) pairs of each.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct PairSizes {
    pub tokens: u32,
    pub slots: u32,
}

/// Pairs that have been sorted by expert: the groups are divided into problems, each of so few
/// pairs that they are multiplied at a time.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct SortedProblems {
    /// The pairs, group by group.
    pub order: Box<[u32]>,
    /// Expert, first position and number of positions of each problem; behind as many as the table
    /// has capacity for, the number of problems.
    pub problems: Box<[u32]>,
    pub capacity: u32,
}

/// (token, slot) pairs grouped by expert. Every cube computes this for itself, from so few pairs
/// that each can be compared with all others; of more, it reads problems that are sorted.
#[derive(CubeType)]
pub(crate) struct Groups<'a> {
    sorted: ComptimeOption<&'a SortedProblems>,
    /// For every pair, the first one with the same expert.
    leaders: Shared<[u32]>,
    experts: Shared<[u32]>,
    starts: Shared<[u32]>,
    order: Shared<[u32]>,
    /// What this plane has of the last three, from here on and from `first_start` on.
    first: usize,
    first_start: usize,
    /// Number of experts that have pairs.
    count: u32,
    /// Where a plane groups the pairs, a bit for each that has an expert.
    with_expert: u32,
    sizes: PairSizes,
    all_experts: u32,
    #[cube(comptime)]
    pub blueprint: GroupsBlueprint,
}

/// How pairs find their experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Pairing {
    /// By ids.
    Ids,
    /// By ids, and they are sorted: each of the [problems](SortedProblems) is a group.
    Sorted,
    /// All have expert 0.
    One,
    /// Each token has a pair with every expert, in the order of experts.
    Every,
}

/// How pairs are grouped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GroupsBlueprint {
    pub pairing: Pairing,
    /// Pairs, at most.
    pub pairs: u32,
    /// Whether all pairs are of one token. It hardly ever has an expert twice, so each pair is a
    /// group of its own. Only where [`planes`](Self::planes) group the pairs.
    pub one_token: bool,
    /// Planes of the cube if each groups the pairs for itself, without waiting for others. They
    /// have 32 lanes, and at least as many as there are pairs. Needs PTX.
    pub planes: Option<u32>,
    pub target: Target,
}

impl GroupsBlueprint {
    /// Pairs that there is shared memory for, and a unit of the cube for each.
    pub const fn held_pairs(self) -> u32 {
        match self.pairing {
            Pairing::Ids => self.pairs,
            Pairing::Sorted | Pairing::One | Pairing::Every => 1,
        }
    }

    /// Planes that each group the pairs for themselves, or one for the whole cube.
    const fn copies(self) -> u32 {
        match self.planes {
            Some(planes) => planes,
            None => 1,
        }
    }

    /// Bytes of shared memory.
    pub const fn shared_bytes(self) -> usize {
        let pairs = self.held_pairs();
        let chosen = match self.planes {
            Some(_) => 0,
            None => pairs + 1,
        };
        let words = pairs + self.copies() * (3 * pairs + 1) + chosen;
        words as usize * size_of::<u32>()
    }
}

#[cube]
impl<'a> Groups<'a> {
    /// Groups the pairs. Every unit of the cube must call this, and the cube must have at least as
    /// many units as [`held_pairs`](GroupsBlueprint::held_pairs).
    pub fn new<I: Int>(
        ids: &ComptimeOption<Box<[I]>>,
        sizes: PairSizes,
        experts: u32,
        #[comptime] blueprint: GroupsBlueprint,
    ) -> Groups<'a> {
        let own = Groups::read::<I>(ids, sizes, experts, blueprint);
        let sorted = ComptimeOption::<&'a SortedProblems>::new_None();
        Groups::of(own, sorted, sizes, experts, blueprint)
    }

    /// Begins to read the expert of this unit's pair. It is compared with their number where it is
    /// used, so that nothing waits for it before.
    pub fn read<I: Int>(
        ids: &ComptimeOption<Box<[I]>>,
        sizes: PairSizes,
        experts: u32,
        #[comptime] blueprint: GroupsBlueprint,
    ) -> u32 {
        let mut expert = NONE.runtime();
        #[comptime]
        if let ComptimeOption::Some(ids) = ids {
            let pair = if comptime!(blueprint.planes.is_some()) {
                UNIT_POS_X
            } else {
                UNIT_POS
            };
            if pair < sizes.tokens * sizes.slots {
                let id = ids[pair as usize];
                let id_bytes = I::size();
                expert = u32::cast_from(id);
                if comptime!(id_bytes > 4) {
                    let inside = id >= I::from_int(0) && id < I::cast_from(experts);
                    expert = select(inside, expert, NONE);
                }
            }
        }
        expert
    }

    /// [`new`](Self::new) from the expert that each unit has [`read`](Self::read).
    pub fn of(
        own: u32,
        sorted: ComptimeOption<&'a SortedProblems>,
        sizes: PairSizes,
        experts: u32,
        #[comptime] blueprint: GroupsBlueprint,
    ) -> Groups<'a> {
        let max_pairs = comptime!(blueprint.held_pairs() as usize);
        let copies = comptime!(blueprint.copies() as usize);
        let copy = if comptime!(blueprint.planes.is_some()) {
            UNIT_POS_Y as usize
        } else {
            0usize.runtime()
        };
        let mut groups = Groups::<'a> {
            sorted,
            leaders: Shared::new_slice(max_pairs),
            experts: Shared::new_slice(comptime!(copies * max_pairs)),
            starts: Shared::new_slice(comptime!(copies * (max_pairs + 1))),
            order: Shared::new_slice(comptime!(copies * max_pairs)),
            first: copy * max_pairs,
            first_start: copy * comptime!(max_pairs + 1),
            count: 1u32.runtime(),
            with_expert: 0u32.runtime(),
            sizes,
            all_experts: experts,
            blueprint,
        };
        match comptime!(blueprint.pairing) {
            Pairing::Ids => {
                let own = select(own < experts, own, NONE);
                if comptime!(blueprint.one_token) {
                    groups.list_by_plane(own);
                } else if comptime!(blueprint.planes.is_some()) {
                    groups.fill_by_plane(own);
                } else {
                    groups.fill(own, max_pairs);
                }
            }
            Pairing::Sorted => {
                let sorted = groups.sorted.unwrap();
                let count = sorted.problems[sorted.capacity as usize * 3];
                groups.count = min(count, sorted.capacity);
            }
            Pairing::One => {}
            Pairing::Every => groups.count = experts,
        }
        groups
    }

    /// Makes each pair a group; `own` is the expert of this lane's pair.
    fn list_by_plane(&mut self, own: u32) {
        let has_expert = own != NONE;
        self.with_expert = ballot(has_expert, self.blueprint.target);
        self.count = self.with_expert.count_ones();
        if has_expert {
            let before = self.with_expert & ((1u32 << UNIT_POS_X) - 1u32);
            let at = self.first + before.count_ones() as usize;
            self.order[at] = UNIT_POS_X;
            self.experts[at] = own;
        }
        sync_plane();
    }

    /// Groups the pairs; `own` is the expert of this lane's pair.
    fn fill_by_plane(&mut self, own: u32) {
        let target = comptime!(self.blueprint.target);
        let lane = UNIT_POS_X;
        let has_expert = own != NONE;
        let peers = plane_matches(own);
        // The bit of the first pair with the same expert.
        let leader = select(has_expert, peers & (!peers + 1u32), NONE);
        let leads = leader == 1u32 << lane;
        let leaders = ballot(leads, target);
        let with_expert = ballot(has_expert, target);
        // Pairs of groups whose leaders come before this lane, and then before its own leader.
        let size = select(leads, peers.count_ones(), 0u32);
        let before = plane_running_sum(size, self.blueprint.pairs, target) - size;
        let before = plane_value(before, (leader - 1u32).count_ones(), target);
        let within = (peers & ((1u32 << lane) - 1u32)).count_ones();
        let rank = (leaders & (leader - 1u32)).count_ones();
        self.count = leaders.count_ones();
        self.with_expert = with_expert;
        if has_expert {
            self.order[self.first + (before + within) as usize] = lane;
            if leads {
                self.experts[self.first + rank as usize] = own;
                self.starts[self.first_start + rank as usize] = before;
            }
        }
        if lane == 0 {
            let end = with_expert.count_ones();
            self.starts[self.first_start + self.count as usize] = end;
        }
        sync_plane();
    }

    /// Groups the pairs; `own` is the expert of this unit's pair.
    fn fill(&mut self, own: u32, #[comptime] max_pairs: usize) {
        let pairs = self.sizes.tokens * self.sizes.slots;
        let mut chosen = Shared::<[u32]>::new_slice(max_pairs);
        let mut all = Shared::<u32>::new();
        let pair = UNIT_POS;
        if pair < pairs {
            chosen[pair as usize] = own;
        }
        sync_cube();
        let mut leader = pair;
        if pair < pairs {
            let mut other = pair;
            while other > 0 {
                other -= 1;
                if chosen[other as usize] == own {
                    leader = other;
                }
            }
            leader = select(own == NONE, NONE, leader);
            self.leaders[pair as usize] = leader;
        }
        sync_cube();
        if pair < pairs {
            let mut before = 0u32;
            let mut within = 0u32;
            let mut rank = 0u32;
            let mut count = 0u32;
            let mut total = 0u32;
            for other in 0..pairs {
                let other_leader = self.leaders[other as usize];
                let leads = other_leader == other;
                before += select(other_leader < leader, 1u32, 0u32);
                within += select(other_leader == leader && other < pair, 1u32, 0u32);
                rank += select(leads && other < leader, 1u32, 0u32);
                count += select(leads, 1u32, 0u32);
                total += select(other_leader == NONE, 0u32, 1u32);
            }
            if leader != NONE {
                self.order[(before + within) as usize] = pair;
                if leader == pair {
                    self.experts[rank as usize] = own;
                    self.starts[rank as usize] = before;
                }
            }
            if pair == 0 {
                self.starts[count as usize] = total;
                *all = count;
            }
        }
        sync_cube();
        self.count = *all;
    }

    /// Number of experts that have pairs.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// The expert of a group.
    pub fn expert(&self, group: u32) -> u32 {
        match comptime!(self.blueprint.pairing) {
            Pairing::Ids => self.experts[self.first + group as usize],
            Pairing::Sorted => self.sorted.unwrap().problems[group as usize * 3],
            Pairing::One => 0u32.runtime(),
            Pairing::Every => group,
        }
    }

    /// Where a group's pairs start, for [`pair`](Self::pair).
    pub fn start(&self, group: u32) -> u32 {
        match comptime!(self.blueprint.pairing) {
            Pairing::Ids => {
                if comptime!(self.blueprint.one_token) {
                    group
                } else {
                    self.starts[self.first_start + group as usize]
                }
            }
            Pairing::Sorted => self.sorted.unwrap().problems[group as usize * 3 + 1],
            Pairing::One => 0u32.runtime(),
            Pairing::Every => group,
        }
    }

    /// Number of pairs of the group that starts there.
    pub fn size(&self, group: u32, start: u32) -> u32 {
        match comptime!(self.blueprint.pairing) {
            Pairing::Ids => {
                if comptime!(self.blueprint.one_token) {
                    1u32.runtime()
                } else {
                    self.starts[self.first_start + group as usize + 1] - start
                }
            }
            Pairing::Sorted => self.sorted.unwrap().problems[group as usize * 3 + 2],
            _ => self.sizes.tokens,
        }
    }

    /// Pair `index` of the group that starts at `start`.
    pub fn pair(&self, start: u32, index: u32) -> u32 {
        match comptime!(self.blueprint.pairing) {
            Pairing::Ids => self.order[self.first + (start + index) as usize],
            Pairing::Sorted => self.sorted.unwrap().order[(start + index) as usize],
            Pairing::One => index,
            Pairing::Every => index * self.all_experts + start,
        }
    }

    /// Whether the pair has an expert.
    pub fn has_expert(&self, pair: u32) -> bool {
        if comptime!(self.blueprint.pairing != Pairing::Ids) {
            true.runtime()
        } else if comptime!(self.blueprint.planes.is_some()) {
            self.with_expert >> pair & 1u32 == 1u32
        } else {
            self.leaders[pair as usize] != NONE
        }
    }
}
