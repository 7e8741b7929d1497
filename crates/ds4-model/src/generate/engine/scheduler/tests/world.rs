//! What carries out plans, and checks that they can be.

use std::collections::{BTreeMap, BTreeSet};

use super::super::*;

pub(super) const CHUNK: usize = 64;
pub(super) const CALL: usize = 16;
pub(super) const SIZES: [usize; 2] = [16, 300];
/// Steps after which every text of a sequence has ended.
pub(super) const MOST_STEPS: usize = 20_000;

pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, limit: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % limit
    }
}

pub(super) struct Host {
    /// Texts of which a token is kept.
    kept: BTreeSet<RequestId>,
}

/// A position takes a byte.
impl Memory for Host {
    fn bytes(&self, positions: usize) -> usize {
        positions
    }

    fn has_place(&self, _: &[[usize; 2]]) -> bool {
        true
    }

    fn is_ready(&self, _: usize) -> bool {
        true
    }

    fn known(&self, id: RequestId) -> usize {
        usize::from(self.kept.contains(&id))
    }

    fn give_back(&mut self) -> bool {
        !std::mem::take(&mut self.kept).is_empty()
    }
}

#[derive(Debug)]
pub(super) struct Text {
    new: NewTask,
    tokens: usize,
    /// Positions that the model has.
    length: usize,
    pub(super) lane: Option<Place>,
    /// Whether its prompt has begun, and lanes were promised to it.
    is_begun: bool,
}

/// Carries out what is planned, and checks it.
pub(super) struct World {
    pub(super) scheduler: Scheduler,
    pub(super) host: Host,
    pub(super) texts: BTreeMap<RequestId, Text>,
    pub(super) groups: BTreeMap<GroupId, Vec<Option<RequestId>>>,
    pub(super) failed: BTreeSet<RequestId>,
    pub(super) preempted: usize,
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
                kept: BTreeSet::new(),
            },
            texts: BTreeMap::new(),
            groups: BTreeMap::new(),
            failed: BTreeSet::new(),
            preempted: 0,
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
        };
        self.texts.insert(id, text);
        if prompt > 1 && self.random.below(5) == 0 {
            // Those that are alike begin alike.
            let kept = self.texts.values().filter(|text| text.new.like == like);
            self.host.kept.extend(kept.map(|text| text.new.id));
        }
        id
    }

    pub(super) fn remove(&mut self, id: RequestId) {
        self.scheduler.remove(id);
        if let Some(place) = self.texts.remove(&id).and_then(|text| text.lane) {
            self.groups.get_mut(&place.group).unwrap()[place.lane] = None;
        }
    }

    fn is_refused(&mut self) -> bool {
        self.refusals > 0 && self.random.below(self.refusals) == 0
    }

    fn bytes(&self) -> usize {
        let lanes = self
            .groups
            .iter()
            .map(|(id, lanes)| id.capacity * lanes.len());
        let begun = self
            .texts
            .values()
            .filter(|text| text.is_begun && text.lane.is_none());
        lanes.sum::<usize>() + begun.map(|text| text.tokens).sum::<usize>()
    }

    /// Carries out a change, unless it is refused.
    fn change(&mut self, change: Change) -> bool {
        match change {
            Change::Make(id, lanes) => {
                if self.is_refused() {
                    return false;
                }
                assert!(self.groups.insert(id, vec![None; lanes]).is_none());
            }
            Change::Arrange(id, kept) => {
                let lanes = self.groups[&id].clone();
                if self.is_refused() {
                    return false;
                }
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
            }
            Change::Move { id, to, .. } => {
                let text = self.texts.get_mut(&id).unwrap();
                let from = text.lane.replace(to).expect("it has a lane");
                assert!(from.group.capacity < to.group.capacity);
                self.groups.get_mut(&from.group).unwrap()[from.lane] = None;
                let lane = &mut self.groups.get_mut(&to.group).unwrap()[to.lane];
                assert_eq!(lane.replace(id), None, "two texts in one lane");
            }
            Change::Preempt { id, .. } => self.preempt(id),
            Change::Fail { id, capacity, .. } => {
                let text = self.texts.remove(&id).expect("it has not ended");
                if let Some(place) = text.lane {
                    self.groups.get_mut(&place.group).unwrap()[place.lane] = None;
                }
                let others = self
                    .texts
                    .values()
                    .filter(|text| text.lane.is_some())
                    .count();
                let fits = capacity + text.tokens <= self.scheduler.limits.bytes;
                assert!(
                    self.refusals > 0 || others == 0 || !fits,
                    "{id} fails for nothing"
                );
                self.failed.insert(id);
            }
        }
        true
    }

    /// Carries out changes up to one that is refused, and tells whether all are carried out.
    fn carry_out(&mut self, changes: Vec<Change>) -> bool {
        let mut is_granted = true;
        for change in changes {
            if is_granted || matches!(change, Change::Fail { .. }) {
                is_granted &= self.change(change);
            }
            let is_within = self.refusals > 0 || self.bytes() <= self.scheduler.limits.bytes;
            assert!(is_within, "{} bytes", self.bytes());
        }
        if !is_granted {
            let groups = self.groups.iter();
            let groups = groups.map(|(id, lanes)| (*id, &lanes[..]));
            self.scheduler.restore(groups);
            let waiting = self.texts.values_mut();
            for text in waiting.filter(|text| text.lane.is_none()) {
                (text.length, text.is_begun) = (0, false);
            }
        }
        is_granted
    }

    fn preempt(&mut self, id: RequestId) {
        self.preempted += 1;
        let text = self.texts.get_mut(&id).unwrap();
        (text.length, text.is_begun) = (0, false);
        if let Some(place) = text.lane.take() {
            self.groups.get_mut(&place.group).unwrap()[place.lane] = None;
        }
        let tokens = text.tokens;
        self.scheduler.set_tokens(id, tokens);
    }

    /// Processes a call. Returns its rows.
    fn call(&mut self, call: Call) -> usize {
        let [sequences, width] = call.shape();
        let Limits {
            lane_rows,
            exact_rows,
            ..
        } = self.scheduler.limits;
        let is_exact = |row: &Row| {
            let lanes = self.groups.get(&row.place.group).map_or(0, Vec::len);
            lanes * lane_rows <= exact_rows
        };
        if sequences > 1 && call.rows.iter().any(is_exact) && self.refusals == 0 {
            assert!(sequences * width <= exact_rows);
        }
        if self.is_refused() {
            for row in call.rows {
                self.scheduler.refuse_text(row.id);
                let text = self.texts.get_mut(&row.id).unwrap();
                (text.length, text.is_begun) = (0, false);
            }
            return 0;
        }
        let mut before = None;
        for row in call.rows {
            let is_copy = before.replace(row.sequence) == Some(row.sequence);
            let Some(place) = self.scheduler.place(row.id) else {
                continue;
            };
            let known = self.host.known(row.id);
            let text = self.texts.get_mut(&row.id).unwrap();
            let is_next = text.length.max(known) == row.first;
            assert!(is_copy || is_next, "{row:?}: {text:?}");
            assert!(!is_copy || row.enters);
            (text.length, text.is_begun) = (row.end, true);
            assert_eq!(row.enters, row.end == text.tokens - 1);
            if row.enters {
                text.lane = Some(place);
                let lane = &mut self.groups.get_mut(&place.group).unwrap()[place.lane];
                assert_eq!(lane.replace(row.id), None, "two texts in one lane");
            }
        }
        sequences * width
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
        let waiting: Vec<NewTask> = self
            .scheduler
            .tasks
            .iter()
            .filter(|task| task.place.is_none())
            .map(|task| task.new)
            .collect();
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
        if !self.carry_out(plan.changes) {
            return self.check();
        }
        let (mut used, count) = (Vec::new(), plan.calls.len());
        for own in plan.calls {
            let of = |row: &Row| &self.texts[&row.id];
            let longest = own.rows.iter().map(|row| of(row).tokens).max().unwrap_or(0);
            let [sequences, _] = own.shape();
            let new = sequences * usize::from(!of(&own.rows[0]).is_begun);
            assert!(self.refusals > 0 || self.bytes() + new * longest <= bytes);
            let id = own.rows[0].id;
            let rows = self.call(own);
            // Calls over one text after the other count as one.
            match used.last_mut() {
                Some((last, sum)) if *last == id => *sum += rows,
                _ => used.push((id, rows)),
            }
            assert!(self.refusals > 0 || self.bytes() <= bytes);
        }
        let used: usize = used.iter().map(|(_, rows)| call.max(*rows)).sum();
        assert!(used <= chunk, "{used} tokens in {count} calls");
        assert!(
            self.texts
                .values()
                .filter(|text| text.lane.is_some())
                .count()
                <= lanes
        );
        for id in plan.decoded {
            let Some(texts) = self.groups.get(&id).cloned() else {
                continue;
            };
            for own in texts.into_iter().flatten() {
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
        let promised = self
            .scheduler
            .groups
            .iter()
            .map(Group::texts)
            .sum::<usize>();
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
