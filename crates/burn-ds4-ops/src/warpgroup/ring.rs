use cubecl::prelude::*;

use super::{arrive, arrive_after_copies, expect_bytes, fence_shared, init_barrier, is_over, wait};
use crate::intrinsics::shared_address;

/// How a [`Ring`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RingBlueprint {
    pub stages: u32,
    /// Arrivals that say that a stage has landed: one for each unit that copies, and one for each
    /// of its planes that also writes by itself.
    pub landings: u32,
    /// Planes that read stages.
    pub planes: u32,
    /// Whether units write stages, or copy to them by `cp.async`, and products read what they have
    /// written. Where products read only boxes, a stage that has landed is full.
    pub fenced: bool,
}

impl RingBlueprint {
    /// The distance from the barrier that says that copies have landed to the one that says that
    /// the stage is full.
    const fn full(self) -> u32 {
        8 * self.fenced as u32 * self.stages
    }
}

/// Where a warpgroup is in a ring of stages in shared memory, which the cube's first warpgroup
/// fills and the others read. A stage has up to three barriers: its copies have landed, it is full,
/// it is free.
///
/// Products read shared memory in another way than units write it, and boxes are copied to it. So
/// there must be a fence between units and products. It would hold up units that multiply. The
/// first plane that copies waits for the copies instead, has the fence, and says that the stage is
/// full.
#[derive(CubeType)]
pub(crate) struct Ring {
    barriers: u32,
    pub slot: u32,
    parity: u32,
    /// Stages that have been copied to, but are not full yet, and the first of them.
    pending: u32,
    landing: u32,
    landing_parity: u32,
    #[cube(comptime)]
    blueprint: RingBlueprint,
}

#[cube]
impl Ring {
    /// `barriers` are three for each stage, or two without a fence; those that say that copies have
    /// landed come first. Every unit of the cube must call this.
    pub fn new<E: CubePrimitive>(
        barriers: &Shared<[E]>,
        #[comptime] blueprint: RingBlueprint,
    ) -> Ring {
        let RingBlueprint {
            stages,
            landings,
            planes,
            fenced,
        } = comptime!(blueprint);
        let barriers = shared_address(barriers);
        if UNIT_POS == 0 {
            #[unroll]
            for i in 0..stages {
                init_barrier(barriers + comptime!(8 * i), landings);
                if comptime!(fenced) {
                    init_barrier(barriers + comptime!(8 * (stages + i)), 1u32);
                }
                let free = comptime!(8 * ((1 + fenced as u32) * stages + i));
                init_barrier(barriers + free, planes);
            }
        }
        // Boxes arrive at barriers in another way than units do.
        fence_shared();
        sync_cube();
        Ring {
            barriers,
            slot: 0u32.runtime(),
            parity: 0u32.runtime(),
            pending: 0u32.runtime(),
            landing: 0u32.runtime(),
            landing_parity: 0u32.runtime(),
            blueprint,
        }
    }

    pub fn next(&mut self) {
        self.slot += 1;
        if self.slot == comptime!(self.blueprint.stages) {
            self.slot = 0;
            self.parity ^= 1;
        }
    }

    /// The barrier at which planes arrive when they have read the stage.
    pub fn free(&self) -> u32 {
        let first = comptime!(self.blueprint.full() + 8 * self.blueprint.stages);
        self.barriers + 8 * self.slot + first
    }

    /// Waits until the stage is full.
    pub fn wait_full(&self) {
        let full = self.barriers + 8 * self.slot + comptime!(self.blueprint.full());
        wait(full, self.parity);
    }

    /// Waits until the stage is free. Meanwhile, the first plane says which stages are full.
    pub fn wait_free(&mut self) {
        let free = self.free();
        if comptime!(!self.blueprint.fenced) {
            wait(free, self.parity ^ 1);
        } else if UNIT_POS < 32 {
            while !is_over(free, self.parity ^ 1) {
                self.pass_on();
            }
            self.pass_on();
        } else {
            wait(free, self.parity ^ 1);
        }
    }

    /// Says that boxes of so many bytes in all will land in the stage. Comes before them and before
    /// [`copied`](Self::copied) of the same unit.
    pub fn expect(&self, #[comptime] bytes: u32) {
        expect_bytes(self.barriers + 8 * self.slot, bytes);
    }

    /// Says that this unit has started all copies to the stage.
    pub fn copied(&mut self) {
        arrive_after_copies(self.barriers + 8 * self.slot);
        self.pending += 1;
        self.next();
    }

    /// Says that this plane has written to the stage by itself, too. Comes before
    /// [`copied`](Self::copied).
    pub fn written(&self) {
        arrive(self.barriers + 8 * self.slot);
    }

    /// Says that the first pending stage is full, if it is. Only for the first plane.
    fn pass_on(&mut self) {
        if self.pending > 0 {
            let landed = self.barriers + 8 * self.landing;
            if is_over(landed, self.landing_parity) {
                fence_shared();
                arrive(landed + comptime!(self.blueprint.full()));
                self.pending -= 1;
                self.landing += 1;
                if self.landing == comptime!(self.blueprint.stages) {
                    self.landing = 0;
                    self.landing_parity ^= 1;
                }
            }
        }
    }

    /// Waits until everything has been passed on. Every unit that copies must call this at the end,
    /// if there is a fence.
    pub fn finish(&mut self) {
        if UNIT_POS < 32 {
            while self.pending > 0 {
                self.pass_on();
            }
        }
    }
}
