//! What carries out plans, and checks that they can be.

use std::collections::{BTreeMap, BTreeSet};

use super::super::*;
use super::host::{Host, MOST_KINDS, RECORDING, Random};

pub(super) const CHUNK: usize = 64;
pub(super) const CALL: usize = 16;
pub(super) const SIZES: [usize; 2] = [16, 300];
/// Steps after which every text of a sequence has ended.
pub(super) const MOST_STEPS: usize = 20_000;

#[derive(Debug)]
pub(super) struct Text {
    new: NewTask,
    tokens: usize,
    /// Positions that the model has.
    length: usize,
    pub(super) lane: Option<Place>,
    /// Whether its prompt has begun, and lanes were promised to it.
    is_begun: bool,
    /// Whether a device has had no memory for it.
    is_refused: bool,
    /// Whether it has given way when its lane was full.
    was_stuck: bool,
}

/// Carries out what is planned, and checks it.
pub(super) struct World {
    pub(super) scheduler: Scheduler,
    pub(super) host: Host,
    pub(super) texts: BTreeMap<RequestId, Text>,
    pub(super) groups: BTreeMap<GroupId, Vec<Option<RequestId>>>,
    pub(super) failed: BTreeSet<RequestId>,
    pub(super) preempted: usize,
    pub(super) refused: usize,
    /// Positions of lanes that are never made.
    pub(super) refused_size: Option<usize>,
    /// One of so many steps is of another kind; none with 0.
    pub(super) kinds: usize,
    /// Groups without a step ahead.
    settled: BTreeSet<GroupId>,
    /// Whether steps that are ahead end texts.
    pub(super) ends: bool,
    /// Prompts of which less was kept than planned for.
    pub(super) resumed: usize,
    random: Random,
    /// One of so many allocations fails; none with 0.
    refusals: usize,
    next: u64,
}

impl World {
    pub(super) fn new(seed: u64, limits: Limits, refusals: usize) -> Self {
        Self {
            scheduler: Scheduler::new(limits),
            host: Host {
                device: usize::MAX,
                ..Host::default()
            },
            texts: BTreeMap::new(),
            groups: BTreeMap::new(),
            failed: BTreeSet::new(),
            preempted: 0,
            refused: 0,
            refused_size: None,
            kinds: 0,
            settled: BTreeSet::new(),
            ends: false,
            resumed: 0,
            random: Random(seed),
            refusals,
            next: 0,
        }
    }

    pub(super) fn add(&mut self, prompt: usize, more: usize, priority: i64) -> RequestId {
        let id = RequestId(self.next);
        self.next += 1;
        let like = match self.texts.last_key_value() {
            Some((_, last)) if last.new.prompt == prompt && !last.is_begun => last.new.like,
            _ => id,
        };
        let new = NewTask {
            id,
            priority,
            prompt,
            all: prompt + more,
            like,
        };
        self.scheduler.add(new);
        let text = Text {
            new,
            tokens: prompt,
            length: 0,
            lane: None,
            is_begun: false,
            is_refused: false,
            was_stuck: false,
        };
        self.texts.insert(id, text);
        if prompt > 1 && self.random.below(5) == 0 {
            // Those that are alike begin alike.
            let known = 1 + self.random.below(prompt - 1);
            let alike = self.texts.values().filter(|text| text.new.like == like);
            let kept = alike.map(|text| (text.new.id, known));
            self.host.kept.extend(kept);
        }
        id
    }

    pub(super) fn remove(&mut self, id: RequestId) {
        self.scheduler.remove(id);
        if let Some(place) = self.texts.remove(&id).and_then(|text| text.lane) {
            self.groups.get_mut(&place.group).unwrap()[place.lane] = None;
        }
    }

    /// Whether caches of so many bytes are refused to a text. What is asked for has place.
    fn is_refused(&mut self, id: Option<RequestId>, bytes: usize) -> bool {
        let used = self.bytes() + self.host.recorded_bytes();
        assert!(used + bytes <= self.host.device, "{bytes} bytes");
        let is_refused = self.refusals > 0 && self.random.below(self.refusals) == 0;
        if let Some(text) = id.and_then(|id| self.texts.get_mut(&id))
            && is_refused
        {
            text.is_refused = true;
        }
        is_refused
    }

    /// Counts the steps of a group that are ahead, which may end texts, but for one.
    fn settle(&mut self, id: GroupId, but: Option<RequestId>) {
        let texts: Vec<RequestId> = self.groups[&id].iter().flatten().copied().collect();
        for own in texts {
            let is_ahead = self.ends && !self.settled.contains(&id) && Some(own) != but;
            if is_ahead && self.random.below(12) == 0 {
                self.remove(own);
            }
        }
    }

    fn bytes(&self) -> usize {
        let groups = self.groups.iter();
        let lanes = groups.map(|(id, lanes)| id.capacity * lanes.len());
        let texts = self.texts.values();
        let begun = texts.filter(|text| text.is_begun && text.lane.is_none());
        lanes.sum::<usize>() + begun.map(|text| text.tokens).sum::<usize>()
    }

    /// Carries out a change, unless it is refused.
    fn change(&mut self, change: Change) -> bool {
        match change {
            Change::Make(id, lanes) => {
                let asks = self.scheduler.asks.map(|(id, _)| id);
                if self.refused_size == Some(id.capacity)
                    || self.is_refused(asks, id.capacity * lanes)
                {
                    let text = asks.and_then(|id| self.texts.get_mut(&id));
                    text.expect("who asked").is_refused = true;
                    return false;
                }
                assert!(self.groups.insert(id, vec![None; lanes]).is_none());
            }
            Change::Arrange(id, kept) => {
                self.settle(id, None);
                let lanes = self.groups[&id].clone();
                let asks = self.scheduler.asks.map(|(id, _)| id);
                if self.is_refused(asks, id.capacity * kept.len()) {
                    return false;
                }
                self.host.recorded.remove(&id);
                let texts: Vec<_> = kept.iter().map(|lane| lanes[(*lane)?]).collect();
                let sorted = |texts: &[Option<RequestId>]| -> BTreeSet<RequestId> {
                    texts.iter().flatten().copied().collect()
                };
                assert_eq!(sorted(&texts), sorted(&lanes), "a text is lost");
                for (lane, text) in texts.iter().enumerate() {
                    if let Some(text) = text {
                        let place = Place { group: id, lane };
                        self.texts.get_mut(text).unwrap().lane = Some(place);
                    }
                }
                self.groups.insert(id, texts);
            }
            Change::Drop(id) => {
                let lanes = self.groups.remove(&id).expect("it was made");
                assert!(lanes.iter().all(Option::is_none), "{id:?} is in use");
                self.host.recorded.remove(&id);
            }
            Change::Move { id, to, .. } => {
                self.settle(to.group, Some(id));
                let text = self.texts.get_mut(&id).unwrap();
                let from = text.lane.replace(to).expect("it has a lane");
                assert!(from.group.capacity < to.group.capacity);
                self.groups.get_mut(&from.group).unwrap()[from.lane] = None;
                let lane = &mut self.groups.get_mut(&to.group).unwrap()[to.lane];
                assert_eq!(lane.replace(id), None, "two texts in one lane");
            }
            Change::Preempt(id) => self.preempt(id),
            Change::Fail { id, capacity, from } => {
                let text = self.texts.remove(&id).expect("it has not ended");
                assert_eq!(text.lane, from);
                let beside = from.map_or(text.tokens, |from| from.group.capacity);
                let needed = capacity + beside;
                let is_stuck = from.is_some() || text.was_stuck;
                let never_fits = is_stuck && needed > self.scheduler.limits.bytes;
                let has_others = self.texts.values().any(|text| text.is_begun);
                let is_last = !has_others
                    && self.groups.len() <= 1
                    && self.host.kept.is_empty()
                    && self.host.recorded_bytes() == 0;
                let is_refused = text.is_refused || needed > self.host.device;
                assert!(
                    never_fits || is_last && is_refused,
                    "{id} fails for nothing"
                );
                if let Some(place) = from {
                    self.groups.get_mut(&place.group).unwrap()[place.lane] = None;
                }
                self.failed.insert(id);
            }
        }
        true
    }

    /// Carries out changes up to one that is refused.
    fn carry_out(&mut self, changes: Vec<Change>) {
        for change in changes {
            if self.change(change) {
                assert!(self.bytes() <= self.scheduler.limits.bytes);
                continue;
            }
            self.refused += 1;
            let groups = self.groups.iter();
            let groups = groups.map(|(id, lanes)| (*id, &lanes[..]));
            self.scheduler.restore(groups);
            for (id, text) in &mut self.texts {
                if self.scheduler.place(*id).is_none() {
                    (text.length, text.is_begun) = (0, false);
                }
            }
            return;
        }
    }

    fn preempt(&mut self, id: RequestId) {
        let Limits { step, .. } = self.scheduler.limits;
        // It may have ended in a step that was ahead.
        if let Some(place) = self.texts.get(&id).and_then(|text| text.lane) {
            self.settle(place.group, None);
        }
        let Some(text) = self.texts.get_mut(&id) else {
            return;
        };
        self.preempted += 1;
        if let Some(place) = text.lane.take() {
            let capacity = place.group.capacity;
            self.groups.get_mut(&place.group).unwrap()[place.lane] = None;
            // A step that was ahead has given it more.
            let is_ahead = !self.settled.contains(&place.group)
                && text.length + 1 + step[1] <= capacity
                && text.tokens + 1 < text.new.all;
            text.tokens += usize::from(is_ahead);
            text.length += usize::from(is_ahead);
            text.was_stuck = text.length + step[0] > capacity;
        }
        (text.length, text.is_begun) = (0, false);
        self.scheduler.set_tokens(id, text.tokens);
    }

    /// Processes a call. Returns its rows.
    fn call(&mut self, mut call: Call) -> usize {
        let scheduler = &self.scheduler;
        call.retain(|row| scheduler.place(row.id).is_some());
        let [sequences, width] = call.shape();
        let Limits {
            lane_rows,
            exact_rows,
            bytes,
            ..
        } = self.scheduler.limits;
        let Some(first) = call.rows.first().copied() else {
            return 0;
        };
        let is_exact = |row: &Row| self.groups[&row.place.group].len() * lane_rows <= exact_rows;
        if sequences > 1 && call.rows.iter().any(is_exact) {
            assert!(sequences * width <= exact_rows);
        }
        let has_caches = self.texts[&first.id].is_begun;
        if !has_caches {
            let of = |row: &Row| self.texts[&row.id].tokens;
            let longest = call.rows.iter().map(of).max().unwrap_or(0);
            let size = match sequences {
                1 => [self.texts[&first.id].tokens, 1, 0],
                _ => [longest, sequences, call.padding()],
            };
            let needed = self.host.bytes_of(size);
            assert!(self.bytes() + needed <= bytes);
            if self.is_refused(Some(first.id), needed) {
                self.refused += 1;
                self.scheduler.refuse_call(&call.rows);
                return 0;
            }
        }
        // What was kept may be gone.
        let known = self.host.known(first.id);
        if self.random.below(9) == 0 {
            self.host.kept.clear();
        }
        let length = match has_caches {
            true => self.texts[&first.id].length,
            false => known.min(self.host.known(first.id)),
        };
        if sequences == 1 && length < first.first {
            for row in &call.rows {
                self.scheduler.put_back(row.id);
            }
            self.resumed += 1;
            return 0;
        }
        let mut before = None;
        for row in call.rows {
            let is_copy = before.replace(row.sequence) == Some(row.sequence);
            let text = &self.texts[&row.id];
            let is_next = row.first == if row.sequence == 0 { length } else { 0 };
            assert!(is_copy || is_next, "{row:?}: {text:?}");
            assert!(!is_copy || row.enters);
            assert_eq!(row.enters, row.end == text.tokens - 1);
            if row.enters {
                self.settle(row.place.group, None);
            }
            let text = self.texts.get_mut(&row.id).unwrap();
            (text.length, text.is_begun) = (row.end, true);
            if row.enters {
                text.lane = Some(row.place);
                let lane = &mut self.groups.get_mut(&row.place.group).unwrap()[row.place.lane];
                assert_eq!(lane.replace(row.id), None, "two texts in one lane");
            }
        }
        sequences * width
    }

    /// Replays a step of a group, whose kind may be another than before, or records it where there
    /// is place.
    fn record(&mut self, id: GroupId) {
        self.host.used = self.bytes();
        let is_free = self.host.free() >= RECORDING;
        let kinds = self.host.recorded.entry(id).or_default();
        let known = kinds.last().copied().unwrap_or(0);
        let kind = match self.kinds > 0 && self.random.below(self.kinds) == 0 {
            true => self.random.below(MOST_KINDS + 1),
            false => known,
        };
        if let Some(index) = kinds.iter().position(|own| *own == kind) {
            kinds[index..].rotate_left(1);
        } else if is_free && self.kinds > 0 {
            kinds.push(kind);
            let old = kinds.len().saturating_sub(MOST_KINDS);
            kinds.drain(..old);
        }
    }

    pub(super) fn step(&mut self) {
        let Limits {
            step,
            bytes,
            call,
            chunk,
            lanes,
            ..
        } = self.scheduler.limits;
        let full = self.texts.values().filter_map(|text| {
            let capacity = text.lane?.group.capacity;
            let is_full = text.length + step[1] > capacity;
            let may_grow = capacity < SIZES[1] && text.new.all > capacity;
            (is_full && may_grow).then_some(Full {
                id: text.new.id,
                is_stuck: text.length + step[0] > capacity,
            })
        });
        let full: Vec<Full> = full.collect();
        let of = |full: &Full| self.texts[&full.id].lane.map(|place| place.group);
        self.settled = full.iter().filter_map(of).collect();
        let waiting: Vec<NewTask> = self
            .scheduler
            .tasks
            .iter()
            .filter(|task| task.place.is_none())
            .map(|task| task.new)
            .collect();
        (self.host.used, self.host.has_given) = (self.bytes(), false);
        let plan = self.scheduler.plan(&full, &mut self.host);
        // Nobody overtakes another who waits.
        let is_served = |new: &NewTask| {
            let failed =
                |change: &Change| matches!(change, Change::Fail { id, .. } if *id == new.id);
            self.scheduler.place(new.id).is_some() || plan.changes.iter().any(failed)
        };
        let served: Vec<bool> = waiting.iter().map(is_served).collect();
        assert!(
            served.is_sorted_by(|a, b| a >= b),
            "{waiting:?}: {served:?}"
        );
        // A plan gives memory back, or one text asks for it.
        let is_asking = |change: &Change| match change {
            Change::Make(..) => true,
            Change::Arrange(id, kept) => kept.len() > self.groups[id].len(),
            _ => false,
        };
        let changes = || plan.changes.iter();
        let moves = |change: &Change| matches!(change, Change::Move { .. });
        let asks = changes().filter(|change| is_asking(change)).count();
        let mut gives = changes().filter(|change| !is_asking(change) && !moves(change));
        let gives = self.host.has_given || gives.next().is_some();
        assert!(asks + usize::from(gives) <= 1, "{:?}", plan.changes);
        self.carry_out(plan.changes);
        let (mut used, count) = (Vec::new(), plan.calls.len());
        for own in plan.calls {
            let id = own.rows[0].id;
            let rows = self.call(own);
            // Calls over one text after the other count as one.
            match used.last_mut() {
                Some((last, sum)) if *last == id => *sum += rows,
                _ => used.push((id, rows)),
            }
            assert!(self.bytes() <= bytes);
        }
        let used: usize = used.iter().map(|(_, rows)| call.max(*rows)).sum();
        assert!(used <= chunk, "{used} tokens in {count} calls");
        let decoded = self.texts.values().filter(|text| text.lane.is_some());
        assert!(decoded.count() <= lanes);
        for id in self.scheduler.decoded() {
            self.record(id);
            for own in self.groups[&id].clone().into_iter().flatten() {
                let text = self.texts.get_mut(&own).unwrap();
                assert!(text.length + step[0] <= id.capacity, "{text:?}");
                let most = (id.capacity - text.length).min(step[1]);
                let gained = 1 + self.random.below(most);
                text.length += gained;
                text.tokens = (text.tokens + gained).min(text.new.all);
                text.length = text.length.min(text.tokens - 1);
                if text.tokens == text.new.all {
                    self.remove(own);
                }
            }
        }
        self.host.used = self.bytes();
        let changes = self.scheduler.tidy(&self.host);
        self.carry_out(changes);
        self.check();
    }

    /// The scheduler knows what there is, and nothing else.
    pub(super) fn check(&self) {
        let known: BTreeMap<GroupId, usize> = self
            .scheduler
            .groups
            .iter()
            .map(|own| (own.id, own.lanes.len()))
            .collect();
        let made = self.groups.iter().map(|(id, lanes)| (*id, lanes.len()));
        assert_eq!(known, made.collect());
        for text in self.texts.values() {
            let place = self.scheduler.place(text.new.id);
            assert_eq!(place.is_some(), text.is_begun, "{text:?}");
            if text.lane.is_some() {
                assert_eq!(place, text.lane);
            }
        }
        let groups = self.scheduler.groups.iter();
        let promised: usize = groups.map(Group::texts).sum();
        assert_eq!(
            promised,
            self.texts.values().filter(|text| text.is_begun).count()
        );
        assert_eq!(self.texts.len(), self.scheduler.tasks.len());
    }

    pub(super) fn finish(&mut self) {
        for _ in 0..MOST_STEPS {
            if self.texts.is_empty() {
                return;
            }
            self.step();
        }
        panic!("{} texts starve", self.texts.len());
    }
}
