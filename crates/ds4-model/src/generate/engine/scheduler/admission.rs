//! Which prompts are processed between two steps.

use super::plan::{Call, Place, Plan, Row};
use super::task::chunk_end;
use super::{Memory, Scheduler};

impl Scheduler {
    /// Plans calls over prompts, as many tokens as a chunk has, and calls that take no longer.
    pub(super) fn admit(&mut self, memory: &mut dyn Memory, plan: &mut Plan) {
        let mut left = self.limits.chunk;
        let (mut before, mut is_blocked) = (None, false);
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
            if task.is_uncounted {
                is_blocked = true;
                continue;
            }
            let (id, is_new) = (task.new.id, task.place.is_none());
            if is_new && self.placed() >= self.limits.lanes {
                is_blocked = true;
                continue;
            }
            if is_new {
                self.tasks[index].processed = memory.known(id);
            }
            let task = &self.tasks[index];
            let count = self.chunk(index).0 - task.processed;
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
            self.push_row(index, 0, &mut call);
            if call.rows[0].enters {
                self.add_others(is_new, left + cost, &mut call, memory, plan);
                let [sequences, width] = call.shape();
                left -= (sequences * width).saturating_sub(cost).min(left);
            }
            self.call_bytes = self.call_bytes.max(self.bytes_of(&call, memory));
            plan.calls.push(call);
        }
    }

    /// Where the next chunk of a text ends, and whether it is marked there.
    fn chunk(&self, index: usize) -> (usize, bool) {
        let task = &self.tasks[index];
        let last = task.new.prompt.min(task.tokens) - 1;
        if task.processed < last {
            let Self { limits, .. } = self;
            return chunk_end([task.processed, last], limits.chunk, limits.marks);
        }
        // What it has generated once, it gets again as it was, in calls of a few tokens.
        (
            (task.processed + self.limits.exact_rows).min(task.last()),
            false,
        )
    }

    /// Finds a lane for a text that waits; `false` if it has to wait for longer, or ends here.
    fn begin(&mut self, index: usize, memory: &mut dyn Memory, plan: &mut Plan) -> bool {
        let task = self.tasks[index];
        let capacity = self.capacity_of(task.tokens, task.new.all);
        let is_alone = self.placed() == 0;
        // Steps go on while tables for long texts are worked out.
        let is_ready = is_alone || memory.is_ready(capacity);
        let prompts = [task.tokens];
        let mut place = None;
        if is_ready && !(is_alone && self.is_refused) {
            place = self.reserve(task.new.id, capacity, &prompts, memory, plan);
        }
        if place.is_none() && is_alone && memory.give_back() {
            self.tasks[index].processed = memory.known(task.new.id);
            place = self.reserve(task.new.id, capacity, &prompts, memory, plan);
        }
        if place.is_none() && is_alone {
            // Nobody else can leave what is missing.
            self.fail(index, capacity, plan);
            return false;
        }
        let task = &mut self.tasks[index];
        task.place = place;
        task.processed *= usize::from(place.is_some());
        place.is_some()
    }

    /// Adds the next chunk of a text that has a lane to a call.
    fn push_row(&mut self, index: usize, sequence: usize, call: &mut Call) {
        let (end, is_marked) = self.chunk(index);
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
        task.processed = end;
        task.is_decoded = enters;
    }

    /// Bytes of the caches that a call is over.
    fn bytes_of(&self, call: &Call, memory: &dyn Memory) -> usize {
        let of = |row: &Row| Some(self.tasks[self.index(row.id)?].tokens);
        let longest = call.rows.iter().filter_map(of).max().unwrap_or(0);
        call.shape()[0].saturating_mul(memory.bytes(longest))
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
        let (mut used, longest) = (first.end - first.first, leader.tokens);
        while let Some(index) = self.tasks.iter().position(|task| !task.is_decoded) {
            let task = self.tasks[index];
            let [sequences, width] = call.shape();
            let is_same = task.is_like(&leader);
            let width = width.max(task.last());
            let rows = (sequences + 1) * width;
            let is_short = is_whole
                && self.chunk(index) == (task.last(), false)
                && rows <= most
                && rows <= 2 * (used + task.last())
                && memory.known(task.new.id) == 0;
            let may_begin = task.place.is_none() && !task.is_uncounted;
            if !may_begin || self.placed() >= self.limits.lanes || !(is_same || is_short) {
                return;
            }
            let capacity = self.capacity_of(task.tokens, task.new.all);
            let prompts = vec![longest.max(width + 1); sequences + usize::from(!is_same)];
            let place = memory.is_ready(capacity).then(|| {
                let id = task.new.id;
                self.reserve(id, capacity, &prompts, memory, plan)
            });
            let Some(place) = place.flatten() else {
                return;
            };
            self.tasks[index].place = Some(place);
            let is_exact = |place: Place| self.rows_of(place) <= self.limits.exact_rows;
            let mut places = call.rows.iter().map(|row| row.place).chain([place]);
            let is_any = places.any(is_exact);
            if !is_same && is_any && rows > self.limits.exact_rows {
                self.put_back(index);
                return;
            }
            if is_same {
                let row = *call.rows.last().expect("that of the first");
                let id = task.new.id;
                call.rows.push(Row { id, place, ..row });
                let task = &mut self.tasks[index];
                (task.processed, task.is_decoded) = (row.end, true);
                continue;
            }
            used += task.last();
            self.push_row(index, sequences, call);
            leader = task;
        }
    }
}
