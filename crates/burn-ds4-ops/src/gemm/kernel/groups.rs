use cubecl::prelude::*;

/// The expert of a pair that has none.
const NONE: u32 = 0xffff_ffff;

/// (token, slot) pairs grouped by expert. Every cube computes this for itself, from so few pairs
/// that each can be compared with all others.
#[derive(CubeType)]
pub(crate) struct Groups {
    /// For every pair, the first one with the same expert.
    leaders: Shared<[u32]>,
    experts: Shared<[u32]>,
    starts: Shared<[u32]>,
    order: Shared<[u32]>,
    count: Shared<u32>,
    pairs: u32,
    all_experts: u32,
    #[cube(comptime)]
    kind: Pairing,
}

/// How pairs find their experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Pairing {
    /// By ids.
    Ids,
    /// All have expert 0.
    One,
    /// Each token has a pair with every expert, in the order of experts.
    Every,
}

#[cube]
impl Groups {
    /// Groups the pairs. Every unit of the cube must call this; with ids, the cube must have at
    /// least as many units as there are pairs.
    pub fn new<I: Int>(
        ids: &ComptimeOption<Box<[I]>>,
        pairs: u32,
        experts: u32,
        #[comptime] max_pairs: u32,
        #[comptime] kind: Pairing,
    ) -> Groups {
        let own = Groups::read::<I>(ids, pairs, experts);
        Groups::of(own, pairs, experts, max_pairs, kind)
    }

    /// Reads the expert of this unit's pair.
    pub fn read<I: Int>(ids: &ComptimeOption<Box<[I]>>, pairs: u32, experts: u32) -> u32 {
        let mut expert = NONE.runtime();
        #[comptime]
        if let ComptimeOption::Some(ids) = ids {
            if UNIT_POS < pairs {
                let id = ids[UNIT_POS as usize];
                let inside = id >= I::from_int(0) && id < I::cast_from(experts);
                expert = select(inside, u32::cast_from(id), NONE);
            }
        }
        expert
    }

    /// [`new`](Self::new) from the expert that each unit has [`read`](Self::read).
    pub fn of(
        own: u32,
        pairs: u32,
        experts: u32,
        #[comptime] max_pairs: u32,
        #[comptime] kind: Pairing,
    ) -> Groups {
        let max_pairs = comptime!(if kind == Pairing::Ids {
            max_pairs as usize
        } else {
            1
        });
        let mut groups = Groups {
            leaders: Shared::new_slice(max_pairs),
            experts: Shared::new_slice(max_pairs),
            starts: Shared::new_slice(comptime!(max_pairs + 1)),
            order: Shared::new_slice(max_pairs),
            count: Shared::new(),
            pairs,
            all_experts: experts,
            kind,
        };
        if comptime!(kind == Pairing::Ids) {
            groups.fill(own, max_pairs);
        }
        groups
    }

    /// Groups the pairs; `own` is the expert of this unit's pair.
    fn fill(&mut self, own: u32, #[comptime] max_pairs: usize) {
        let pairs = self.pairs;
        let mut chosen = Shared::<[u32]>::new_slice(max_pairs);
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
                *self.count = count;
            }
        }
        sync_cube();
    }

    /// Number of experts that have pairs.
    pub fn count(&self) -> u32 {
        match comptime!(self.kind) {
            Pairing::Ids => *self.count,
            Pairing::One => 1u32.runtime(),
            Pairing::Every => self.all_experts,
        }
    }

    /// The expert of a group.
    pub fn expert(&self, group: u32) -> u32 {
        match comptime!(self.kind) {
            Pairing::Ids => self.experts[group as usize],
            Pairing::One => 0u32.runtime(),
            Pairing::Every => group,
        }
    }

    /// The position of a group's first pair.
    pub fn start(&self, group: u32) -> u32 {
        match comptime!(self.kind) {
            Pairing::Ids => self.starts[group as usize],
            Pairing::One => group * self.pairs,
            Pairing::Every => group * (self.pairs / self.all_experts),
        }
    }

    /// The pair at a position in the order of groups.
    pub fn pair(&self, position: u32) -> u32 {
        match comptime!(self.kind) {
            Pairing::Ids => self.order[position as usize],
            Pairing::One => position,
            Pairing::Every => {
                let tokens = self.pairs / self.all_experts;
                position % tokens * self.all_experts + position / tokens
            }
        }
    }

    /// Whether the pair has an expert.
    pub fn has_expert(&self, pair: u32) -> bool {
        if comptime!(self.kind == Pairing::Ids) {
            self.leaders[pair as usize] != NONE
        } else {
            true.runtime()
        }
    }
}
