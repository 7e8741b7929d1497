//! Lanes, and the memory for them.

use super::group::Group;
use super::plan::{Change, GroupId, Place, Plan};
use super::{Memory, Scheduler, Size};
use crate::generate::request_id::RequestId;

/// Lanes are roomy if they are so many times as many as their texts.
const ROOMY: usize = 4;
/// Steps for which lanes are roomy before they become fewer: what is recorded is recorded anew.
pub(super) const ROOMY_STEPS: usize = 32;

impl Scheduler {
    /// Bytes of all lanes, and of texts that are being processed, without pages.
    fn bytes(&self, memory: &dyn Memory) -> usize {
        let lanes = self.groups.iter();
        let lanes = lanes.map(|own| memory.bytes_of([own.lanes.len(), 0]));
        let begun = self.tasks.iter();
        let begun = begun.filter(|task| task.place.is_some() && !task.is_decoded);
        let begun = begun.map(|_| memory.bytes_of([1, 0]));
        lanes.chain(begun).fold(0, usize::saturating_add)
    }

    /// A lane for a text, beside caches in which prompts are processed; `None` if there is no
    /// memory for both.
    pub(super) fn reserve(
        &mut self,
        id: RequestId,
        prompts: Size,
        memory: &dyn Memory,
        plan: &mut Plan,
    ) -> Option<Place> {
        self.missing.get_mut().clear();
        let place = self.vacant_lane(id, prompts, memory, plan)?;
        let group = self.groups.iter_mut().find(|own| own.id == place.group);
        group.expect("that of the lane").lanes[place.lane] = Some(id);
        Some(place)
    }

    fn vacant_lane(
        &mut self,
        asking: RequestId,
        prompts: Size,
        memory: &dyn Memory,
        plan: &mut Plan,
    ) -> Option<Place> {
        let texts = |own: &Self, way| {
            let group = own.groups.iter().find(|own| own.id == GroupId(way));
            group.map_or(0, Group::texts)
        };
        let way = (0..self.limits.ways).min_by_key(|way| texts(self, *way))?;
        let id = GroupId(way);
        let known = self.groups.iter().find(|own| own.id == id);
        let lanes = known.map_or(0, |own| own.lanes.len());
        if let Some(place) = known.and_then(Group::vacant) {
            return self.fits([0, 0], prompts, memory).then_some(place);
        }
        // For all who may begin, or twice as many, or one more.
        let wanting = self.beginning(memory.spare_pages());
        let wanted = (lanes + wanting.div_ceil(self.limits.ways)).next_power_of_two();
        let most = self.limits.lanes.div_ceil(self.limits.ways);
        let task = &self.tasks[self.index(asking)?];
        let may_ask = self.asks.is_none() && !self.gives_back && !task.is_refused;
        let more = [wanted, 2 * lanes, lanes + 1].map(|more| more.min(most));
        let more = more.into_iter().filter(|more| {
            let is_modest = *more == lanes + 1 || !task.is_modest;
            may_ask && is_modest && *more > lanes
        });
        let fitting = |more: &usize| self.fits([lanes, *more], prompts, memory);
        let Some(more) = { more }.find(fitting) else {
            let place = self.groups.iter().find_map(Group::vacant);
            return place.filter(|_| self.fits([0, 0], prompts, memory));
        };
        self.asks = Some((asking, more == lanes + 1));
        self.lanes = Some([more, 0]);
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

    /// How many of the texts that wait so many pages are enough for, one after the other: one at
    /// least.
    fn beginning(&self, pages: usize) -> usize {
        let waiting = self.tasks.iter().filter(|task| task.place.is_none());
        let mut left = pages.saturating_sub(self.promised);
        let begin = waiting.take_while(|task| {
            let rest = left.checked_sub(task.pages(0, &self.limits));
            left = rest.unwrap_or(0);
            rest.is_some()
        });
        begin.count().max(1)
    }

    /// Whether there is memory for lanes to become more, which are all copied, and for caches of
    /// prompts.
    fn fits(&self, [lanes, more]: [usize; 2], prompts: Size, memory: &dyn Memory) -> bool {
        let added = memory.bytes_of([more - lanes, 0]);
        // All lanes are made before the first call, and calls follow each other.
        let of_calls = self.prompts.iter().chain([&prompts]);
        let of_calls = of_calls.map(|size| memory.bytes_of(*size)).max();
        let needed = added.saturating_add(of_calls.unwrap_or(0));
        if self.bytes(memory).saturating_add(needed) > self.limits.bytes {
            return false;
        }
        let mut caches: Vec<Size> = self.prompts.iter().chain([&prompts]).copied().collect();
        caches.extend(self.lanes);
        caches.extend((more > lanes).then_some([more, 0]));
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
        let copy = [lanes, 0];
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
    /// waits, and groups go that nobody uses or waits for. One lane is kept for the next text, with
    /// what is recorded.
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
        // No more texts can begin than those that are in lanes leave place for.
        let may_begin = self.limits.lanes.saturating_sub(self.placed());
        let waiting = self
            .tasks
            .iter()
            .filter(|task| task.place.is_none())
            .count();
        let mut wanted = waiting.min(may_begin);
        self.drop_unused(&mut plan, |own| {
            let lanes = own.lanes.len();
            let is_wanted = wanted >= lanes;
            wanted -= if is_wanted { lanes } else { 0 };
            is_wanted || lanes == 1
        });
        plan.changes
    }
}
