//! What carries out plans, and checks that they can be.

use std::collections::{BTreeMap, BTreeSet};

use super::super::*;
use super::host::{Host, MOST_KINDS, PAGE, RECORDING, Random, Text};

pub(super) const CHUNK: usize = 64;
pub(super) const CALL: usize = 16;
/// Positions that a text can reach.
pub(super) const REACH: usize = 300;
/// More pages than all texts of a sequence take.
pub(super) const MANY: usize = 100_000;
/// Steps after which every text of a sequence has ended.
pub(super) const MOST_STEPS: usize = 20_000;

/// Carries out what is planned, and checks it.
pub(super) struct World {
    pub(super) scheduler: Scheduler,
    pub(super) host: Host,
    pub(super) texts: BTreeMap<RequestId, Text>,
    pub(super) groups: BTreeMap<GroupId, Vec<Option<RequestId>>>,
    pub(super) failed: BTreeSet<RequestId>,
    pub(super) preempted: usize,
    pub(super) refused: usize,
    /// A text for which lanes are never made.
    pub(super) refused_text: Option<RequestId>,
    /// One of so many steps is of another kind; none with 0.
    pub(super) kinds: usize,
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
                pages: MANY,
                ..Host::default()
            },
            texts: BTreeMap::new(),
            groups: BTreeMap::new(),
            failed: BTreeSet::new(),
            preempted: 0,
            refused: 0,
            refused_text: None,
            kinds: 0,
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
            pages: 0,
            own: 0,
        };
        self.texts.insert(id, text);
        if prompt > 1 && self.random.below(5) == 0 {
            // Those that are alike begin alike.
            let known = 1 + self.random.below(prompt - 1);
            let alike = self.texts.values().filter(|text| text.new.like == like);
            let kept = alike.map(|text| (text.new.id, known));
            let kept: Vec<_> = kept.collect();
            if self.host.free_page_count() > kept.len() {
                self.host.kept.extend(kept);
            }
        }
        id
    }

    pub(super) fn remove(&mut self, id: RequestId) {
        self.scheduler.remove(id);
        let Some(text) = self.texts.remove(&id) else {
            return;
        };
        self.host.taken -= text.own;
        if let Some(place) = text.lane {
            self.groups.get_mut(&place.group).unwrap()[place.lane] = None;
        }
    }

    /// Takes pages for a text.
    fn take(&mut self, id: RequestId, pages: usize, shared: usize) {
        assert!(
            self.host.free_page_count() >= pages,
            "pages were promised twice"
        );
        self.host.taken += pages;
        let text = self.texts.get_mut(&id).unwrap();
        text.own += pages;
        text.pages += pages + shared;
    }

    /// Takes the pages of a text, and what is in them.
    fn give_back(&mut self, id: RequestId) {
        let text = self.texts.get_mut(&id).unwrap();
        self.host.taken -= text.own;
        (text.length, text.is_begun, text.pages, text.own) = (0, false, 0, 0);
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

    /// Counts the steps of a group that are ahead, which may end texts.
    fn settle(&mut self, id: GroupId) {
        let texts: Vec<RequestId> = self.groups[&id].iter().flatten().copied().collect();
        for own in texts {
            if self.ends && self.random.below(12) == 0 {
                self.remove(own);
            }
        }
    }

    fn bytes(&self) -> usize {
        let lanes: usize = self.groups.values().map(Vec::len).sum();
        let texts = self.texts.values();
        let begun = texts.filter(|text| text.is_begun && text.lane.is_none());
        self.host.bytes_of([lanes + begun.count(), 0])
    }

    /// Carries out a change, unless it is refused.
    fn change(&mut self, change: Change) -> bool {
        match change {
            Change::Make(id, lanes) => {
                let asks = self.scheduler.asks.map(|(id, _)| id);
                let bytes = self.host.bytes_of([lanes, 0]);
                if asks.is_some() && asks == self.refused_text || self.is_refused(asks, bytes) {
                    let text = asks.and_then(|id| self.texts.get_mut(&id));
                    text.expect("who asked").is_refused = true;
                    return false;
                }
                assert!(self.groups.insert(id, vec![None; lanes]).is_none());
            }
            Change::Arrange(id, kept) => {
                self.settle(id);
                let lanes = self.groups[&id].clone();
                let asks = self.scheduler.asks.map(|(id, _)| id);
                let bytes = self.host.bytes_of([kept.len(), 0]);
                if asks.is_some() && asks == self.refused_text || self.is_refused(asks, bytes) {
                    let text = asks.and_then(|id| self.texts.get_mut(&id));
                    text.into_iter().for_each(|text| text.is_refused = true);
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
            Change::Preempt(id) => self.preempt(id),
            Change::Fail { id, pages, from } => {
                let text = &self.texts[&id];
                assert_eq!(text.lane, from);
                let others = self.texts.values().filter(|other| other.new.id != id);
                let has_others = others.clone().any(|text| text.is_begun);
                let has_rings = from.is_some()
                    || self.bytes() + self.host.bytes_of([2, 0])
                        <= self.scheduler.limits.bytes.min(self.host.device);
                let is_lacking = pages > 0 && self.host.kept.is_empty();
                let is_refused = pages == 0 && (text.is_refused || !has_rings);
                assert!(
                    !has_others && (is_lacking || is_refused),
                    "{id} fails for nothing"
                );
                self.remove(id);
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
            let texts: Vec<RequestId> = self.texts.keys().copied().collect();
            for id in texts {
                if self.scheduler.place(id).is_none() {
                    self.give_back(id);
                }
            }
            return;
        }
    }

    fn preempt(&mut self, id: RequestId) {
        // It may have ended in a step that was ahead.
        if let Some(place) = self.texts.get(&id).and_then(|text| text.lane) {
            self.settle(place.group);
        }
        let Some(text) = self.texts.get_mut(&id) else {
            return;
        };
        self.preempted += 1;
        if let Some(place) = text.lane.take() {
            self.groups.get_mut(&place.group).unwrap()[place.lane] = None;
            // A step that was ahead has given it more.
            text.tokens += usize::from(text.tokens + 1 < text.new.all);
        }
        let tokens = text.tokens;
        self.give_back(id);
        self.scheduler.set_tokens(id, tokens);
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
            let needed = self.host.bytes_of([sequences, call.padding()]);
            assert!(self.bytes() + needed <= bytes);
            if self.is_refused(Some(first.id), needed) {
                self.refused += 1;
                self.scheduler.refuse_call(&call.rows);
                return 0;
            }
        }
        let mut taken = Vec::new();
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
        let limits = self.scheduler.limits.clone();
        for row in call.rows.iter().filter(|row| !self.texts[&row.id].is_begun) {
            let shared = if row.id == first.id { length / PAGE } else { 0 };
            let task = &self.scheduler.tasks[self.scheduler.index(row.id).unwrap()];
            let pages = task.pages(shared * PAGE, &limits);
            taken.push((row.id, pages, shared));
        }
        for (id, pages, shared) in taken {
            self.take(id, pages, shared);
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
                self.settle(row.place.group);
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
        let limits = self.scheduler.limits.clone();
        let Limits {
            bytes,
            call,
            chunk,
            lanes,
            ..
        } = limits;
        let texts = self.texts.values().filter(|text| text.lane.is_some());
        let lacking = texts.map(|text| (text.new.id, text.lacks(&limits)));
        let lacking: Vec<_> = lacking.filter(|(_, pages)| *pages > 0).collect();
        let waiting: Vec<NewTask> = self
            .scheduler
            .tasks
            .iter()
            .filter(|task| task.place.is_none())
            .map(|task| task.new)
            .collect();
        (self.host.used, self.host.has_given) = (self.bytes(), false);
        let plan = self.scheduler.plan(&lacking, &mut self.host);
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
        let asks = changes().filter(|change| is_asking(change)).count();
        let mut gives = changes().filter(|change| !is_asking(change));
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
        let decoded = self.scheduler.decoded();
        let texts = |world: &Self, id: &GroupId| world.groups[id].clone().into_iter().flatten();
        let stepped: Vec<RequestId> = decoded.iter().flat_map(|id| texts(self, id)).collect();
        for own in stepped {
            self.take(own, self.texts[&own].lacks(&limits), 0);
        }
        for id in decoded {
            self.record(id);
            for own in texts(self, &id) {
                let gained = 1 + self.random.below(limits.lane_rows);
                let text = self.texts.get_mut(&own).unwrap();
                text.length += gained;
                text.tokens = (text.tokens + gained).min(text.new.all);
                text.length = text.length.min(text.tokens - 1);
                assert!(text.length <= text.pages * PAGE, "{text:?}");
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
        let own: usize = self.texts.values().map(|text| text.own).sum();
        assert_eq!(own, self.host.taken, "pages are lost");
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
