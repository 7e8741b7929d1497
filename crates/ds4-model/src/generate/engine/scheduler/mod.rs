//! Which texts have lanes, and what each step does for whom.
//!
//! Host data only: the scheduler knows numbers of tokens and of bytes, and neither tensors nor
//! devices. Each step it makes a [`Plan`], which the engine carries out. The policies:
//!
//! - First come, first served, those of a higher priority before all others. Nobody overtakes a
//!   text that waits for memory.
//! - Between two steps, the calls over prompts take no longer than one of a chunk. Short prompts
//!   that wait go through one call, as far as their texts stay the same.
//! - Where a text needs more pages and there are none, what is kept of ended texts goes, the least
//!   recently used first, and then the youngest texts give way.
//!
//! A plan either gives memory back or asks for it, and has one text ask for lanes at most. So what
//! the devices tell of their memory holds while the plan is carried out, and a refusal is that of
//! one text, which asks no more until something is given back. Pages that a plan has promised are
//! there when it is carried out.
//!
//! **Nothing hangs.** A text in a lane gains a token each step, unless it is stuck: it has no pages
//! for the step. While one is stuck, no text begins. Each plan then gives it the pages, or takes
//! those of the youngest text. In the end the text has its pages, or has given way itself to older
//! ones, or is alone and ends with an error. A text that has given way returns when there are pages
//! for all of its tokens, and one more for each text beside it. So the oldest of the highest
//! priority gets to its end, and then the next one. The first that waits begins at the latest when
//! no other text has a lane: then all that it does not need itself is given back, one thing after
//! the other, and it ends with an error if it is refused even so.

mod admission;
mod group;
mod lanes;
mod plan;
mod task;
#[cfg(test)]
mod tests;

use plan::Place;
pub(super) use plan::{Call, Change, GroupId, Plan, Row};
pub(super) use task::NewTask;

use std::cell::RefCell;

use self::group::Group;
use self::task::Task;
use crate::generate::request_id::RequestId;

/// What the scheduler abides by.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    /// Most texts in lanes.
    pub(super) lanes: usize,
    /// Groups that lanes are divided into.
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
    /// Positions of a page.
    pub(super) page: usize,
    /// Whether the pages of what is known of a text are there already.
    pub(super) shares: bool,
    /// Positions beyond its tokens that a text has pages for.
    pub(super) ahead: usize,
    /// Positions that a text can reach.
    pub(super) reach: usize,
    /// Bytes of what is not in pages.
    pub(super) bytes: usize,
}

/// Caches that are made, but for pages: texts, and positions by which they may turn out to be
/// shorter.
pub(super) type Size = [usize; 2];

/// What there is besides texts and lanes.
pub(super) trait Memory {
    /// Bytes of caches.
    fn bytes_of(&self, size: Size) -> usize;

    /// Whether the devices have place for some caches, beside all that there is.
    fn has_place(&self, caches: &[Size]) -> bool;

    /// Pages that nobody has, and that may be made yet.
    fn spare_pages(&self) -> usize;

    /// Makes so many pages free, if need be by dropping what is kept of texts that have ended, the
    /// least recently used first. Returns how many are missing.
    fn free_pages(&mut self, wanted: usize) -> usize;

    /// Tokens of a text that waits which need not be processed, because they are kept.
    fn known(&self, id: RequestId) -> usize;

    /// Drops what is recorded of steps, but for those that these groups replay now, if that leaves
    /// place for some caches; `false` if nothing is dropped.
    fn drop_recordings(&mut self, decoded: &[GroupId], caches: &[Size]) -> bool;

    /// Gives back what is kept of texts that have ended; `false` if there is nothing.
    fn give_back(&mut self) -> bool;
}

#[derive(Debug)]
pub(super) struct Scheduler {
    pub(super) limits: Limits,
    /// By priority, then as they came.
    tasks: Vec<Task>,
    groups: Vec<Group>,
    /// The text for which this plan asks the devices for lanes, and whether they are as few as can
    /// be.
    asks: Option<(RequestId, bool)>,
    /// Whether this plan gives memory back. It asks for no more then.
    gives_back: bool,
    /// Caches for which devices have had no place when a lane was looked for last.
    missing: RefCell<Vec<Size>>,
    /// The lanes that it gets.
    lanes: Option<Size>,
    /// Caches of prompts that this plan begins.
    prompts: Vec<Size>,
    /// Pages that this plan has promised.
    promised: usize,
}

impl Scheduler {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            tasks: Vec::new(),
            groups: Vec::new(),
            asks: None,
            gives_back: false,
            missing: RefCell::default(),
            lanes: None,
            prompts: Vec::new(),
            promised: 0,
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
            self.tasks[index].tokens = tokens;
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

    /// Groups whose texts gain tokens: a position of each lane, and those of drafts.
    pub(super) fn decoded(&self) -> Vec<GroupId> {
        let groups = self.groups.iter().map(|own| own.id);
        let decoded = groups.filter(|id| {
            let of = |task: &&Task| task.place.is_some_and(|place| place.group == *id);
            let mut own = self.tasks.iter().filter(of);
            own.clone().any(|task| task.is_decoded) && own.all(|task| !task.is_stuck)
        });
        decoded.collect()
    }

    /// Plans changes and calls. These texts lack so many pages for their next steps.
    pub(super) fn plan(&mut self, lacking: &[(RequestId, usize)], memory: &mut dyn Memory) -> Plan {
        let mut plan = self.new_plan();
        let mut in_turn = Vec::new();
        for task in &mut self.tasks {
            task.is_stuck = false;
            let own = lacking.iter().find(|(id, _)| *id == task.new.id);
            in_turn.extend(own.copied());
        }
        for (id, pages) in in_turn {
            self.provide(id, pages, memory, &mut plan);
        }
        self.admit(memory, &mut plan);
        plan
    }

    fn new_plan(&mut self) -> Plan {
        (self.asks, self.lanes, self.gives_back) = (None, None, false);
        self.promised = 0;
        self.missing.get_mut().clear();
        self.prompts.clear();
        Plan::default()
    }

    /// Goes back to the groups that there are, after a device has had no memory for a change: that
    /// one, and those after it, have not been made. Texts without their lane wait.
    pub(super) fn restore<'g>(
        &mut self,
        groups: impl Iterator<Item = (GroupId, &'g [Option<RequestId>])>,
    ) {
        let groups = groups.map(|(id, lanes)| Group::new(id, lanes.to_vec()));
        self.groups = groups.collect();
        for index in 0..self.tasks.len() {
            let id = self.tasks[index].new.id;
            let known = self.groups.iter().find_map(|own| {
                let lane = own.lanes.iter().position(|text| *text == Some(id))?;
                Some(Place {
                    group: own.id,
                    lane,
                })
            });
            if known.is_some() {
                (self.tasks[index].place, self.tasks[index].is_decoded) = (known, true);
                continue;
            }
            // Lanes are promised to texts that are not decoded yet.
            let vacant = self.tasks[index].place.and_then(|place| {
                let mut groups = self.groups.iter_mut();
                let own = groups.find(|own| own.id == place.group)?;
                own.lanes.get_mut(place.lane).filter(|lane| lane.is_none())
            });
            match vacant {
                Some(lane) => *lane = Some(id),
                None => {
                    self.tasks[index].place = None;
                    self.put_back_at(index);
                }
            }
        }
        if let Some((id, is_least)) = self.asks.take() {
            self.refuse(id, is_least);
        }
    }

    /// Forgets all lanes. Their texts wait.
    pub(super) fn start_over(&mut self) {
        self.groups.clear();
        self.asks = None;
        for task in &mut self.tasks {
            task.place = None;
            (task.is_decoded, task.is_stuck, task.processed) = (false, false, 0);
        }
        self.forget_refusals();
    }

    /// Lets the texts of a call wait for whose caches a device has no memory.
    pub(super) fn refuse_call(&mut self, rows: &[Row]) {
        for row in rows {
            self.put_back(row.id);
        }
        if let Some(first) = rows.first() {
            let is_alone = rows.iter().all(|row| row.id == first.id);
            self.refuse(first.id, is_alone);
        }
    }

    /// Lets a text wait that has a lane.
    pub(super) fn put_back(&mut self, id: RequestId) {
        if let Some(index) = self.index(id) {
            self.put_back_at(index);
        }
    }

    /// Notes that a text was refused memory, and whether it had asked for no more than it needs.
    fn refuse(&mut self, id: RequestId, is_least: bool) {
        if let Some(index) = self.index(id) {
            let task = &mut self.tasks[index];
            (task.is_refused, task.is_modest) = (is_least, true);
        }
    }

    /// Notes that there is more memory than there was: whoever was refused may ask again.
    fn forget_refusals(&mut self) {
        self.tasks
            .iter_mut()
            .for_each(|task| task.is_refused = false);
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
            self.forget_refusals();
        }
    }

    fn put_back_at(&mut self, index: usize) {
        self.release(index);
        let task = &mut self.tasks[index];
        (task.is_decoded, task.is_stuck, task.processed) = (false, false, 0);
    }

    /// Whether somebody else has a lane, who may leave memory to a text.
    fn has_others(&self, id: RequestId) -> bool {
        let mut placed = self.tasks.iter().filter(|task| task.place.is_some());
        placed.any(|task| task.new.id != id)
    }

    /// Promises pages to a text for its next steps, or takes those of another for it.
    fn provide(&mut self, id: RequestId, pages: usize, memory: &mut dyn Memory, plan: &mut Plan) {
        let index = self.index(id).expect("a text that is decoded");
        if self.tasks[index].place.is_none() {
            // It has given way.
            return;
        }
        // What another has given back is for an older text.
        let missing = match self.gives_back {
            true => pages,
            false => memory.free_pages(self.promised + pages),
        };
        if missing == 0 {
            self.promised += pages;
            return;
        }
        self.tasks[index].is_stuck = true;
        if !self.gives_back && !self.preempt_for(id, plan) {
            self.fail(index, missing, plan);
        }
    }

    /// Whether it is for want of place on the devices that a text waits.
    fn lacks_place(&self, index: usize) -> bool {
        self.tasks[index].is_refused || !self.missing.borrow().is_empty()
    }

    /// Lets idle recordings go for a text for which devices have no place; `false` if there are
    /// none, or too few for a text that may as well wait.
    fn drop_recordings(&mut self, index: usize, memory: &mut dyn Memory) -> bool {
        let task = &self.tasks[index];
        // Otherwise it fails.
        let is_last = self.placed() == 0;
        let decoded = self.decoded();
        let caches = match task.is_refused || is_last {
            true => Vec::new(),
            false => self.missing.borrow().clone(),
        };
        let is_any = self.lacks_place(index) && memory.drop_recordings(&decoded, &caches);
        self.note_given(is_any)
    }

    /// The same, and after those what is kept of ended texts.
    fn give_back(&mut self, index: usize, memory: &mut dyn Memory) -> bool {
        let lacks_place = self.lacks_place(index);
        if self.drop_recordings(index, memory) {
            return true;
        }
        let is_any = lacks_place && memory.give_back();
        self.note_given(is_any)
    }

    /// Notes whether this plan has given memory back.
    fn note_given(&mut self, is_any: bool) -> bool {
        if is_any {
            self.gives_back = true;
            self.forget_refusals();
        }
        is_any
    }

    /// Takes the pages of the youngest text of the lowest priority, which comes last, for another
    /// text; or its own, if that is the youngest. `false` if there is no other.
    fn preempt_for(&mut self, id: RequestId, plan: &mut Plan) -> bool {
        let mut tasks = self.tasks.iter();
        let index = tasks.rposition(|task| task.place.is_some());
        let Some(index) = index.filter(|_| self.has_others(id)) else {
            return false;
        };
        let youngest = self.tasks[index].new.id;
        self.put_back_at(index);
        self.gives_back = true;
        plan.changes.push(Change::Preempt(youngest));
        true
    }

    fn fail(&mut self, index: usize, pages: usize, plan: &mut Plan) {
        let (id, from) = (self.tasks[index].new.id, self.tasks[index].place);
        self.remove(id);
        self.gives_back = true;
        plan.changes.push(Change::Fail { id, pages, from });
    }
}
