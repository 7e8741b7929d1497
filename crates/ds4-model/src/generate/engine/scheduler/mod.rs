//! Which texts have lanes, and what each step does for whom.
//!
//! Host data only: the scheduler knows numbers of tokens and of bytes, and neither tensors nor
//! devices. Each step it makes a [`Plan`], which the engine carries out. The policies:
//!
//! - First come, first served, those of a higher priority before all others. Nobody overtakes a
//!   text that waits for memory.
//! - Between two steps, the calls over prompts take no longer than one of a chunk. Short prompts
//!   that wait go through one call, as far as their texts stay the same.
//! - Where a text needs a larger lane and there is no memory for it, the youngest texts give way.
//!   So the oldest goes on whatever happens, and each is the oldest some day.

mod admission;
mod lanes;
mod plan;
mod task;
#[cfg(test)]
mod tests;

pub(super) use plan::{Call, Change, GroupId, Place, Plan, Row};
pub(super) use task::NewTask;

use self::lanes::Group;
use self::task::Task;
use crate::generate::request_id::RequestId;

/// What the scheduler abides by.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    /// Most texts in lanes.
    pub(super) lanes: usize,
    /// Groups that lanes of one size are divided into.
    pub(super) ways: usize,
    /// Tokens of prompts between two steps.
    pub(super) chunk: usize,
    /// Tokens that a call counts for at least.
    pub(super) call: usize,
    /// Rows of a step for each of its lanes.
    pub(super) lane_rows: usize,
    /// Rows up to which each has the bits that it has alone. Texts in lanes of no more rows are the
    /// same whatever else runs, and so are calls over their prompts.
    pub(super) exact_rows: usize,
    /// Whether chunks end where others may continue from.
    pub(super) marks: bool,
    /// Positions of the smallest lanes, and of the largest.
    pub(super) sizes: [usize; 2],
    /// Positions of a step without drafts, and with all.
    pub(super) step: [usize; 2],
    /// Bytes of all caches.
    pub(super) bytes: usize,
}

/// What there is besides texts and lanes.
pub(super) trait Memory {
    /// Bytes of the caches of a text of so many positions.
    fn bytes(&self, positions: usize) -> usize;

    /// Whether the devices have place for some caches, of so many positions and texts each.
    fn has_place(&self, caches: &[[usize; 2]]) -> bool;

    /// Whether caches of so many positions can be made at once.
    fn is_ready(&self, capacity: usize) -> bool;

    /// Tokens of a text that waits which need not be processed, because they are kept.
    fn known(&self, id: RequestId) -> usize;

    /// Gives back what is kept of texts that have ended; `false` if there is nothing.
    fn give_back(&mut self) -> bool;
}

/// A text with too few positions for a step of all drafts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Full {
    pub(super) id: RequestId,
    /// Whether there are too few for any step.
    pub(super) is_stuck: bool,
}

#[derive(Debug)]
pub(super) struct Scheduler {
    pub(super) limits: Limits,
    /// By priority, then as they came.
    tasks: Vec<Task>,
    /// Smaller lanes first.
    groups: Vec<Group>,
    /// Whether a device has refused memory in the last step.
    is_refused: bool,
    /// Bytes of the caches of one of the calls that are planned, at most.
    call_bytes: usize,
}

impl Scheduler {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            tasks: Vec::new(),
            groups: Vec::new(),
            is_refused: false,
            call_bytes: 0,
        }
    }

    /// Adds a text, which waits.
    pub(super) fn add(&mut self, new: NewTask) {
        let before = |task: &Task| (-task.new.priority, task.new.id) < (-new.priority, new.id);
        let index = self.tasks.partition_point(before);
        self.tasks.insert(index, Task::new(new));
    }

    /// Forgets a text. Its lane is vacant.
    pub(super) fn remove(&mut self, id: RequestId) {
        if let Some(index) = self.index(id) {
            self.release(index);
            self.tasks.remove(index);
        }
    }

    /// Notes how many tokens a text has that is preempted.
    pub(super) fn set_tokens(&mut self, id: RequestId, tokens: usize) {
        if let Some(index) = self.index(id) {
            let task = &mut self.tasks[index];
            (task.tokens, task.is_uncounted) = (tokens, false);
        }
    }

    /// The lane of a text.
    pub(super) fn place(&self, id: RequestId) -> Option<Place> {
        self.tasks[self.index(id)?].place
    }

    /// Texts that are decoded.
    pub(super) fn running(&self) -> usize {
        self.tasks.iter().filter(|task| task.is_decoded).count()
    }

    /// Texts that are not yet.
    pub(super) fn waiting(&self) -> usize {
        self.tasks.len() - self.running()
    }

    /// Plans a step. These texts are full; their group has no step ahead.
    pub(super) fn plan(&mut self, full: &[Full], memory: &mut dyn Memory) -> Plan {
        let mut plan = Plan::default();
        self.call_bytes = 0;
        for full in full {
            self.enlarge(*full, memory, &mut plan);
        }
        self.admit(memory, &mut plan);
        self.is_refused = false;
        let decoded = self.tasks.iter().filter(|task| task.is_decoded);
        let decoded = decoded.filter_map(|task| Some(task.place?.group));
        plan.decoded = decoded.collect();
        plan.decoded.sort();
        plan.decoded.dedup();
        plan
    }

    /// Goes back to the groups that there are, with the texts that are decoded in their lanes,
    /// after a device has had no memory for a change. All others wait.
    pub(super) fn restore<'g>(
        &mut self,
        groups: impl Iterator<Item = (GroupId, &'g [Option<RequestId>])>,
    ) {
        self.is_refused = true;
        (0..self.tasks.len()).for_each(|index| self.put_back(index));
        let groups = groups.map(|(id, lanes)| Group::new(id, lanes.to_vec()));
        self.groups = groups.collect();
        for own in &self.groups {
            for (lane, id) in own.lanes.iter().enumerate() {
                let task = self.tasks.iter_mut().find(|task| Some(task.new.id) == *id);
                if let Some(task) = task {
                    let group = own.id;
                    (task.place, task.is_decoded) = (Some(Place { group, lane }), true);
                    task.is_uncounted = false;
                }
            }
        }
    }

    /// Lets a text wait for whose caches a device has no memory.
    pub(super) fn refuse_text(&mut self, id: RequestId) {
        self.is_refused = true;
        if let Some(index) = self.index(id) {
            self.put_back(index);
        }
    }

    fn index(&self, id: RequestId) -> Option<usize> {
        self.tasks.iter().position(|task| task.new.id == id)
    }

    /// Texts that have lanes.
    fn placed(&self) -> usize {
        self.tasks
            .iter()
            .filter(|task| task.place.is_some())
            .count()
    }

    /// Makes the lane of a text vacant.
    fn release(&mut self, index: usize) {
        if let Some(place) = self.tasks[index].place.take()
            && let Some(group) = self.groups.iter_mut().find(|own| own.id == place.group)
        {
            group.lanes[place.lane] = None;
        }
    }

    /// Lets a text wait that has a lane.
    fn put_back(&mut self, index: usize) {
        self.release(index);
        let task = &mut self.tasks[index];
        (task.is_decoded, task.processed) = (false, 0);
    }

    /// Whether somebody else has a lane, who may leave memory to a text.
    fn has_others(&self, id: RequestId) -> bool {
        let mut placed = self.tasks.iter().filter(|task| task.place.is_some());
        placed.any(|task| task.new.id != id)
    }

    /// Gives a larger lane to a text that is full.
    fn enlarge(&mut self, full: Full, memory: &mut dyn Memory, plan: &mut Plan) {
        let Some(index) = self.index(full.id) else {
            return;
        };
        let Some(from) = self.tasks[index].place else {
            // It has given way to another.
            return;
        };
        let capacity = self.capacity_for(from.group.capacity + 1);
        let mut to = self.reserve(full.id, capacity, &[], memory, plan);
        if to.is_none() && memory.give_back() {
            to = self.reserve(full.id, capacity, &[], memory, plan);
        }
        if to.is_none() && !full.is_stuck {
            // A step of fewer drafts has place yet.
            return;
        }
        let may_fit = memory.bytes(capacity) <= self.limits.bytes;
        while to.is_none() && may_fit {
            // The youngest of the lowest priority comes last.
            let youngest = self.tasks.iter().rposition(|task| task.place.is_some());
            let youngest = youngest.expect("one has a lane");
            let id = self.tasks[youngest].new.id;
            if id == full.id && !self.has_others(id) {
                break;
            }
            self.preempt(youngest, memory, plan);
            if id == full.id {
                return;
            }
            to = self.reserve(full.id, capacity, &[], memory, plan);
        }
        // Lanes may have been arranged anew.
        let index = self.index(full.id).expect("it is still there");
        let from = self.tasks[index].place;
        match to {
            Some(to) => {
                let id = full.id;
                // Both lanes are its own until now.
                let from = from.expect("it has a lane");
                self.release(index);
                self.tasks[index].place = Some(to);
                plan.changes.push(Change::Move { id, from, to });
            }
            None => self.fail(index, capacity, plan),
        }
    }

    /// Takes a text's lane.
    fn preempt(&mut self, index: usize, memory: &dyn Memory, plan: &mut Plan) {
        let id = self.tasks[index].new.id;
        let from = self.tasks[index].place.expect("it has a lane");
        self.put_back(index);
        self.tasks[index].is_uncounted = true;
        plan.changes.push(Change::Preempt { id, from });
        let group = self.groups.iter().position(|own| own.id == from.group);
        let group = group.expect("that of a lane");
        match self.groups[group].texts() {
            0 => {
                self.groups.remove(group);
                plan.changes.push(Change::Drop(from.group));
            }
            texts => self.arrange(group, texts, memory, plan),
        }
    }

    fn fail(&mut self, index: usize, capacity: usize, plan: &mut Plan) {
        let (id, from) = (self.tasks[index].new.id, self.tasks[index].place);
        self.remove(id);
        plan.changes.push(Change::Fail { id, capacity, from });
    }
}
