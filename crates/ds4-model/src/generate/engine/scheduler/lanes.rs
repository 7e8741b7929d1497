//! Lanes, and the memory for them.

use super::group::Group;
use super::plan::{Change, GroupId, Place, Plan};
use super::task::Task;
use super::{Memory, Scheduler, Size};
use crate::generate::request_id::RequestId;

/// How many times as many positions the lanes of the next larger size have.
const SIZE_FACTOR: usize = 4;
/// Lanes are roomy if they are so many times as many as their texts.
const ROOMY: usize = 4;
/// Steps for which lanes are roomy before they become fewer: what is recorded is recorded anew.
pub(super) const ROOMY_STEPS: usize = 32;

impl Scheduler {
    /// Positions of the smallest lanes that have at least `positions`. Where the next size would be
    /// the largest and hardly larger, there is that alone.
    pub(crate) fn capacity_for(&self, positions: usize) -> usize {
        let [mut capacity, largest] = self.limits.sizes;
        while capacity < positions && capacity < largest {
            capacity = capacity.saturating_mul(SIZE_FACTOR);
        }
        match capacity.saturating_mul(2) > largest {
            true => largest,
            false => capacity,
        }
    }

    /// Positions of the lane that a text of so many tokens gets, which may have `all` in the end.
    pub(crate) fn capacity_of(&self, tokens: usize, all: usize) -> usize {
        let [_, step] = self.limits.step;
        self.capacity_for(tokens.saturating_add(step).min(all))
    }

    /// Positions of the lane that a text gets.
    pub(super) fn size_of(&self, task: &Task) -> usize {
        let [least, _] = self.limits.step;
        match task.tokens > task.new.prompt {
            // One that has given way gets no larger lane than it had, unless that was full.
            true => self.capacity_for(task.last().saturating_add(least).min(task.new.all)),
            false => self.capacity_of(task.tokens, task.new.all),
        }
    }

    /// Positions of the lane that a text waits for.
    fn wanted_size(&self, task: &Task) -> Option<usize> {
        match task.place {
            None => Some(self.size_of(task)),
            Some(own) => task
                .is_full
                .then(|| self.capacity_for(own.group.capacity + 1)),
        }
    }

    /// Bytes of all lanes, and of texts that are being processed.
    fn bytes(&self, memory: &dyn Memory) -> usize {
        let lanes = self.groups.iter();
        let lanes = lanes.map(|own| memory.bytes_of([own.id.capacity, own.lanes.len(), 0]));
        let begun = self.tasks.iter();
        let begun = begun.filter(|task| task.place.is_some() && !task.is_decoded);
        let begun = begun.map(|task| memory.bytes(task.tokens));
        lanes.chain(begun).fold(0, usize::saturating_add)
    }

    /// A lane of so many positions for a text, beside caches in which prompts are processed; `None`
    /// if there is no memory for both.
    pub(super) fn reserve(
        &mut self,
        id: RequestId,
        capacity: usize,
        prompts: Option<Size>,
        memory: &dyn Memory,
        plan: &mut Plan,
    ) -> Option<Place> {
        self.missing.get_mut().clear();
        let place = self.vacant_lane(id, capacity, prompts, memory, plan)?;
        let group = self.groups.iter_mut().find(|own| own.id == place.group);
        group.expect("that of the lane").lanes[place.lane] = Some(id);
        Some(place)
    }

    fn vacant_lane(
        &mut self,
        asking: RequestId,
        capacity: usize,
        prompts: Option<Size>,
        memory: &dyn Memory,
        plan: &mut Plan,
    ) -> Option<Place> {
        let texts = |own: &Self, way| {
            let group = own
                .groups
                .iter()
                .find(|own| own.id == GroupId { capacity, way });
            group.map_or(0, Group::texts)
        };
        let way = (0..self.limits.ways).min_by_key(|way| texts(self, *way))?;
        let id = GroupId { capacity, way };
        let known = self.groups.iter().find(|own| own.id == id);
        let lanes = known.map_or(0, |own| own.lanes.len());
        if let Some(place) = known.and_then(Group::vacant) {
            return self
                .fits([capacity, 0, 0], prompts, memory)
                .then_some(place);
        }
        // For all who want such lanes, or twice as many, or one more.
        let sizes = self.tasks.iter().filter_map(|task| self.wanted_size(task));
        let wanting = sizes.filter(|size| *size == capacity).count();
        let wanted = (lanes + wanting.div_ceil(self.limits.ways)).next_power_of_two();
        let most = self.limits.lanes.div_ceil(self.limits.ways);
        let task = &self.tasks[self.index(asking)?];
        let may_ask = self.asks.is_none() && !self.gives_back && !task.is_refused;
        let more = [wanted, 2 * lanes, lanes + 1].map(|more| more.min(most));
        let more = more.into_iter().filter(|more| {
            let is_modest = *more == lanes + 1 || !task.is_modest;
            may_ask && is_modest && *more > lanes
        });
        let fitting = |more: &usize| self.fits([capacity, lanes, *more], prompts, memory);
        let Some(more) = { more }.find(fitting) else {
            let mut alike = self.groups.iter().filter(|own| own.id.capacity == capacity);
            let place = alike.find_map(Group::vacant);
            return place.filter(|_| self.fits([capacity, 0, 0], prompts, memory));
        };
        self.asks = Some((asking, more == lanes + 1));
        self.lanes = Some([capacity, more, 0]);
        match lanes {
            0 => {
                let after = self.groups.partition_point(|own| own.id < id);
                self.groups.insert(after, Group::new(id, vec![None; more]));
                plan.changes.push(Change::Make(id, more));
            }
            _ => {
                let group = self.groups.iter_mut().find(|own| own.id == id);
                let group = group.expect("it has lanes");
                group.lanes.resize(more, None);
                let kept = (0..more).map(|lane| Some(lane).filter(|lane| *lane < lanes));
                plan.changes.push(Change::Arrange(id, kept.collect()));
            }
        }
        Some(Place {
            group: id,
            lane: lanes,
        })
    }

    /// Whether there is memory for lanes of a capacity to become more, which are all copied, and
    /// for caches of prompts.
    fn fits(
        &self,
        [capacity, lanes, more]: [usize; 3],
        prompts: Option<Size>,
        memory: &dyn Memory,
    ) -> bool {
        let added = memory.bytes_of([capacity, more - lanes, 0]);
        // All lanes are made before the first call, and calls follow each other.
        let of_calls = self.prompts.iter().chain(&prompts);
        let of_calls = of_calls.map(|size| memory.bytes_of(*size)).max();
        let needed = added.saturating_add(of_calls.unwrap_or(0));
        if self.bytes(memory).saturating_add(needed) > self.limits.bytes {
            return false;
        }
        let mut caches: Vec<Size> = self.prompts.iter().chain(&prompts).copied().collect();
        caches.extend(self.lanes);
        caches.extend((more > lanes).then_some([capacity, more, 0]));
        self.has_place(&caches, memory)
    }

    fn has_place(&self, caches: &[Size], memory: &dyn Memory) -> bool {
        let has_place = memory.has_place(caches);
        if !has_place {
            self.missing.replace(caches.to_vec());
        }
        has_place
    }

    /// Drops groups without texts, but for those that are to be kept; `false` if there are none.
    pub(super) fn drop_unused(
        &mut self,
        plan: &mut Plan,
        mut is_kept: impl FnMut(&Group) -> bool,
    ) -> bool {
        let before = self.groups.len();
        self.groups.retain(|own| {
            let is_used = own.texts() > 0 || is_kept(own);
            if !is_used {
                plan.changes.push(Change::Drop(own.id));
            }
            is_used
        });
        let is_any = self.groups.len() < before;
        self.note_given(is_any)
    }

    /// Makes the vacant lanes of a group go for a text; `false` if there are none, or no memory for
    /// the others beside them.
    pub(super) fn drop_vacant(
        &mut self,
        id: RequestId,
        memory: &dyn Memory,
        plan: &mut Plan,
    ) -> bool {
        let task = self.index(id).map(|index| &self.tasks[index]);
        if task.is_none_or(|task| task.is_refused) {
            return false;
        }
        for group in 0..self.groups.len() {
            let texts = self.groups[group].texts();
            if self.arrange(group, texts, memory, plan) {
                self.asks = Some((id, true));
                return true;
            }
        }
        false
    }

    /// Makes the lanes of a group as few as `lanes`, if there is memory for the new ones beside the
    /// old ones.
    fn arrange(
        &mut self,
        group: usize,
        lanes: usize,
        memory: &dyn Memory,
        plan: &mut Plan,
    ) -> bool {
        self.groups[group].roomy_steps = 0;
        let own = &self.groups[group];
        let copy = [own.id.capacity, lanes, 0];
        if lanes >= own.lanes.len() || !self.has_place(&[copy], memory) {
            return false;
        }
        let own = &mut self.groups[group];
        let kept = (0..own.lanes.len()).filter(|lane| own.lanes[*lane].is_some());
        let mut kept: Vec<Option<usize>> = kept.map(Some).collect();
        kept.resize(lanes, None);
        own.lanes = kept.iter().map(|lane| own.lanes[(*lane)?]).collect();
        for (lane, id) in own.lanes.iter().enumerate() {
            let task = self.tasks.iter_mut().find(|task| Some(task.new.id) == *id);
            if let Some(place) = task.and_then(|task| task.place.as_mut()) {
                place.lane = lane;
            }
        }
        plan.changes.push(Change::Arrange(own.id, kept));
        self.note_given(true)
    }

    /// After a step: lanes become fewer of which few have had texts for some time while nobody
    /// waits, and groups go that nobody uses or waits for. One lane of the smallest size is kept
    /// for the next text, with what is recorded.
    pub(crate) fn tidy(&mut self, memory: &dyn Memory) -> Vec<Change> {
        let mut plan = self.new_plan();
        let is_calm = self.waiting() == 0;
        for group in 0..self.groups.len() {
            let own = &mut self.groups[group];
            let texts = own.texts();
            let is_roomy = is_calm && texts > 0 && texts * ROOMY <= own.lanes.len();
            own.roomy_steps = if is_roomy { own.roomy_steps + 1 } else { 0 };
            if own.roomy_steps >= ROOMY_STEPS {
                self.arrange(group, texts.next_power_of_two(), memory, &mut plan);
            }
        }
        let base = self.capacity_for(1);
        let (placed, waiting) = self.tasks.iter().partition(|task| task.place.is_some());
        let (placed, waiting): (Vec<&Task>, Vec<&Task>) = (placed, waiting);
        // No more texts can begin than those that are in lanes leave place for.
        let may_begin = self.limits.lanes.saturating_sub(placed.len());
        let tasks = placed
            .into_iter()
            .chain(waiting.into_iter().take(may_begin));
        let mut wanted: Vec<usize> = tasks.filter_map(|task| self.wanted_size(task)).collect();
        self.drop_unused(&mut plan, |own| {
            let (capacity, lanes) = (own.id.capacity, own.lanes.len());
            let waiting = wanted.iter().filter(|size| **size == capacity);
            if waiting.count() >= lanes {
                // The lanes of another way are for others.
                let mut left = lanes;
                wanted.retain(|size| {
                    let is_other = *size != capacity || left == 0;
                    left -= usize::from(!is_other);
                    is_other
                });
                return true;
            }
            capacity == base && lanes == 1
        });
        plan.changes
    }
}
