use cubecl::prelude::*;

use super::{arrive, arrive_after_copies, fence_shared, init_barrier, is_over, wait};
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
}

/// Where a warpgroup is in a ring of stages in shared memory, which the cube's first warpgroup
/// fills and the others read. A stage has three barriers: its copies have landed, it is full, it is
/// free.
///
/// Products read shared memory in another way than copies write it, so there must be a fence in
/// between. It would hold up units that multiply. The first plane that copies waits for the copies
/// instead, has the fence, and says that the stage is full.
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
    stages: u32,
}

#[cube]
impl Ring {
    /// `barriers` are three for each stage. Every unit of the cube must call this.
    pub fn new(barriers: &Shared<[u64]>, #[comptime] blueprint: RingBlueprint) -> Ring {
        let RingBlueprint {
            stages,
            landings,
            planes,
        } = comptime!(blueprint);
        let barriers = shared_address(barriers);
        if UNIT_POS == 0 {
            #[unroll]
            for i in 0..stages {
                let arrivals = comptime!([landings, 1, planes]);
                #[unroll]
                for which in 0..3u32 {
                    let at = comptime!(8 * (which * stages + i));
                    init_barrier(barriers + at, comptime!(arrivals[which as usize]));
                }
            }
        }
        sync_cube();
        Ring {
            barriers,
            slot: 0u32.runtime(),
            parity: 0u32.runtime(),
            pending: 0u32.runtime(),
            landing: 0u32.runtime(),
            landing_parity: 0u32.runtime(),
            stages,
        }
    }

    pub fn next(&mut self) {
        self.slot += 1;
        if self.slot == self.stages {
            self.slot = 0;
            self.parity ^= 1;
        }
    }

    /// The barrier at which planes arrive when they have read the stage.
    pub fn free(&self) -> u32 {
        self.barriers + 8 * self.slot + comptime!(16 * self.stages)
    }

    /// Waits until the stage is full.
    pub fn wait_full(&self) {
        let full = self.barriers + 8 * self.slot + comptime!(8 * self.stages);
        wait(full, self.parity);
    }

    /// Waits until the stage is free. Meanwhile, the first plane says which stages are full.
    pub fn wait_free(&mut self) {
        let free = self.free();
        if UNIT_POS < 32 {
            while !is_over(free, self.parity ^ 1) {
                self.pass_on();
            }
            self.pass_on();
        } else {
            wait(free, self.parity ^ 1);
        }
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
                arrive(landed + comptime!(8 * self.stages));
                self.pending -= 1;
                self.landing += 1;
                if self.landing == self.stages {
                    self.landing = 0;
                    self.landing_parity ^= 1;
                }
            }
        }
    }

    /// Waits until everything has been passed on. Every unit that copies must call this at the end.
    pub fn finish(&mut self) {
        if UNIT_POS < 32 {
            while self.pending > 0 {
                self.pass_on();
            }
        }
    }
}
