//! Which prompts are processed between two steps.

use super::group::Group;
use super::plan::{Call, GroupId, Place, Plan, Row};
use super::task::chunk_end;
use super::{Memory, Scheduler, Size};

impl Scheduler {
    /// Plans calls over prompts, as many tokens as a chunk has, and calls that take no longer.
    pub(super) fn admit(&mut self, memory: &mut dyn Memory, plan: &mut Plan) {
        let mut left = self.limits.chunk;
        let mut before = None;
        // Whoever has given way waits until those who are stuck have their pages.
        let mut is_blocked = self.tasks.iter().any(|task| task.is_stuck);
        loop {
            let mut tasks = self.tasks.iter();
            let next = tasks.position(|task| {
                let may_begin = task.place.is_some() || !is_blocked;
                !task.is_decoded && may_begin
            });
            let Some(index) = next else {
                return;
            };
            let task = &self.tasks[index];
            let (id, is_new) = (task.new.id, task.place.is_none());
            if is_new && self.placed() >= self.limits.lanes {
                is_blocked = true;
                continue;
            }
            if is_new {
                self.tasks[index].processed = memory.known(id);
            }
            let chunk = self.chunk(index);
            let task = &self.tasks[index];
            let count = chunk.0 - task.processed;
            // A chunk that marks divide counts for one call.
            let sum = match before {
                Some((own, sum)) if own == id && task.processed + 1 < task.new.prompt => sum,
                _ => 0,
            };
            let call_tokens = self.limits.call;
            let known = if sum > 0 { sum.max(call_tokens) } else { 0 };
            let cost = (sum + count).max(call_tokens) - known;
            if cost > left {
                self.tasks[index].processed *= usize::from(!is_new);
                return;
            }
            if is_new && !self.begin(index, memory, plan) {
                is_blocked = true;
                continue;
            }
            left -= cost;
            before = Some((id, sum + count));
            let mut call = Call::default();
            self.push_row(index, chunk, 0, &mut call);
            // After a refusal, nobody begins beside it.
            is_blocked |= is_new && self.tasks[index].is_modest;
            let enters = call.rows[0].enters;
            if enters && !is_blocked {
                self.add_others(is_new, left + cost, &mut call, memory, plan);
                let [sequences, width] = call.shape();
                left -= (sequences * width).saturating_sub(cost).min(left);
            }
            if is_new || enters {
                self.prompts.push(Self::caches_of(&call));
            }
            plan.calls.push(call);
        }
    }

    /// Where the next chunk of a text ends, and whether it is marked there.
    pub(super) fn chunk(&self, index: usize) -> (usize, bool) {
        let (task, limits) = (&self.tasks[index], &self.limits);
        let last = task.new.prompt.min(task.tokens) - 1;
        if task.processed < last {
            return chunk_end([task.processed, last], limits.chunk, limits.marks);
        }
        // What it has generated once, it gets again as it was: in calls of a few tokens, where its
        // steps have no more.
        let is_exact = |place| self.rows_of(place) <= limits.exact_rows;
        match task.place.is_none_or(is_exact) {
            true => ((task.processed + limits.exact_rows).min(task.last()), false),
            false => chunk_end([task.processed, task.last()], limits.chunk, false),
        }
    }

    /// Finds pages and a lane for a text that waits; `false` if it has to wait for longer, or ends
    /// here.
    fn begin(&mut self, index: usize, memory: &mut dyn Memory, plan: &mut Plan) -> bool {
        let task = self.tasks[index];
        let is_alone = self.placed() == 0;
        let missing = self.missing_pages(index, task.processed, memory);
        if memory.known(task.new.id) != task.processed {
            // What it was to begin with has made way for it.
            self.tasks[index].processed = 0;
            self.gives_back = true;
            return false;
        }
        if missing == 0 && !task.is_refused {
            let place = self.reserve(task.new.id, [1, 0], memory, plan);
            self.tasks[index].place = place;
            if place.is_some() {
                self.promised += task.pages(task.processed, &self.limits);
                return true;
            }
        }
        self.tasks[index].processed = 0;
        if self.asks.is_some() || self.gives_back {
            return false;
        }
        // It needs one lane itself.
        let is_needed = |group: &Group| group.id == GroupId(0) && group.lanes.len() == 1;
        if !is_alone {
            if missing == 0 && !self.drop_unused(plan, is_needed) {
                self.drop_recordings(index, memory);
            }
            return false;
        }
        // Nobody else can leave what is missing.
        if !self.drop_unused(plan, is_needed) && !self.give_back(index, memory) {
            self.fail(index, missing, plan);
        }
        false
    }

    /// Pages that are missing for a text to begin, of which so many tokens are known: beside
    /// others, there have to be as many more as they may need soon.
    fn missing_pages(&self, index: usize, known: usize, memory: &mut dyn Memory) -> usize {
        let pages = self.tasks[index].pages(known, &self.limits);
        memory.free_pages(self.promised + pages + self.placed())
    }

    /// Adds the next chunk of a text that has a lane to a call.
    fn push_row(
        &mut self,
        index: usize,
        (end, is_marked): (usize, bool),
        sequence: usize,
        call: &mut Call,
    ) {
        let task = &mut self.tasks[index];
        let enters = end == task.last();
        call.rows.push(Row {
            id: task.new.id,
            place: task.place.expect("it has begun"),
            sequence,
            first: task.processed,
            end,
            is_marked,
            enters,
        });
        (task.processed, task.is_decoded) = (end, enters);
        if enters {
            // Its caches are those of its lane from now on.
            self.forget_refusals();
        }
    }

    /// The caches that a call is over.
    fn caches_of(call: &Call) -> Size {
        [call.shape()[0], call.padding()]
    }

    /// Rows of a step of the group of a lane.
    fn rows_of(&self, place: Place) -> usize {
        let group = self.groups.iter().find(|own| own.id == place.group);
        group.map_or(0, |own| own.lanes.len() * self.limits.lane_rows)
    }

    /// Lets the next texts that wait take part in a call at whose end a text is decoded: those with
    /// the same prompt, and if it is a whole prompt, others whose own is no longer than a chunk.
    /// All sequences are made as long as the longest: at least half of the rows are of use, and
    /// they are `most` at most. Where one of the texts is to be as it is alone, they are no more
    /// than have the same bits.
    fn add_others(
        &mut self,
        is_whole: bool,
        most: usize,
        call: &mut Call,
        memory: &mut dyn Memory,
        plan: &mut Plan,
    ) {
        let first = call.rows[0];
        let is_whole = is_whole && first.first == 0 && !first.is_marked;
        let leader = self.index(first.id).expect("it was planned");
        let mut leader = self.tasks[leader];
        let mut used = first.end - first.first;
        while let Some(index) = self.tasks.iter().position(|task| !task.is_decoded) {
            let task = self.tasks[index];
            let [sequences, width] = call.shape();
            let is_same = task.is_like(&leader);
            let (sequences, width) = match is_same {
                true => (sequences, width),
                false => (sequences + 1, width.max(task.last())),
            };
            let rows = sequences * width;
            let chunk = self.chunk(index);
            let is_short = is_whole
                && chunk == (task.last(), false)
                && rows <= most
                && rows <= 2 * (used + task.last())
                && memory.known(task.new.id) == 0;
            let may_begin = task.place.is_none() && !task.is_modest;
            if !may_begin || self.placed() >= self.limits.lanes || !(is_same || is_short) {
                return;
            }
            if self.missing_pages(index, 0, memory) > 0 {
                return;
            }
            let padding = match is_same {
                true => call.padding(),
                false => width - task.last().min(call.shape()[1] - call.padding()),
            };
            let place = self.reserve(task.new.id, [sequences, padding], memory, plan);
            let Some(place) = place else {
                return;
            };
            self.tasks[index].place = Some(place);
            let is_exact = |place: Place| self.rows_of(place) <= self.limits.exact_rows;
            let mut places = call.rows.iter().map(|row| row.place).chain([place]);
            let is_any = places.any(is_exact);
            if sequences > 1 && is_any && rows > self.limits.exact_rows {
                self.put_back_at(index);
                return;
            }
            self.promised += task.pages(0, &self.limits);
            if is_same {
                let row = *call.rows.last().expect("that of the first");
                let id = task.new.id;
                call.rows.push(Row { id, place, ..row });
                let task = &mut self.tasks[index];
                (task.processed, task.is_decoded) = (row.end, true);
                continue;
            }
            used += task.last();
            self.push_row(index, chunk, sequences - 1, call);
            leader = task;
        }
    }
}
