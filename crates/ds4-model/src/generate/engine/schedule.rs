//! Requests, and what the scheduler plans for them.

use burn::tensor::Device;

use super::config::Request;
use super::group::Group;
use super::lanes::Lanes;
use super::memory::if_fitting;
use super::prefix::PrefixCache;
use super::recorder;
use super::scheduler::{Change, GroupId, Memory, NewTask, Scheduler, Size};
use super::setup::{Setup, new_pool};
use super::state::Engine;
use super::text::{Output, Text, Texts};
use crate::cache::CacheError;
use crate::generate::error::GenerateError;
use crate::generate::request_id::RequestId;

/// What the scheduler is told of devices, recordings, prefixes and texts.
struct KnownMemory<'e, 's> {
    setup: &'e Setup<'s>,
    groups: &'e mut [Group],
    prefixes: &'e mut PrefixCache,
    texts: &'e Texts,
}

impl Memory for KnownMemory<'_, '_> {
    fn bytes_of(&self, size: Size) -> usize {
        // What cannot be made takes more than there is.
        self.setup.bytes_of(size).unwrap_or(usize::MAX)
    }

    fn spare_pages(&self) -> usize {
        self.setup.pool.free() + self.setup.pages_to_make()
    }

    fn free_pages(&mut self, wanted: usize) -> usize {
        loop {
            let missing = wanted.saturating_sub(self.setup.pool.free());
            if missing == 0 || !(self.setup.make_pages(missing) || self.prefixes.drop_oldest()) {
                return missing;
            }
        }
    }

    fn has_place(&self, caches: &[Size]) -> bool {
        self.setup.has_place(caches, &[]).unwrap_or(false)
    }

    fn known(&self, id: RequestId) -> usize {
        let Some(text) = self.texts.get(&id) else {
            return 0;
        };
        match self.setup.random_contexts {
            Some(processed) => (text.tokens.len() - 1).saturating_sub(processed),
            None => self.prefixes.reach(&text.tokens[..text.prompt]),
        }
    }

    fn drop_recordings(&mut self, decoded: &[GroupId], caches: &[Size]) -> bool {
        let old = self.groups.iter_mut();
        if old.fold(false, |any, own| own.lanes.drop_old_recordings() | any) {
            // That may be enough.
            return true;
        }
        let is_decoded = |own: &Group| decoded.contains(&own.id);
        let idle = self.groups.iter();
        let idle = idle.flat_map(|own| own.lanes.idle_bytes(is_decoded(own)));
        let idle: Vec<_> = idle.collect();
        if !self.setup.has_place(caches, &idle).unwrap_or(false) {
            return false;
        }
        let groups = self.groups.iter_mut();
        let dropped = groups.map(|own| own.lanes.drop_recordings(decoded.contains(&own.id)));
        dropped.fold(false, |any, own| any | own)
    }

    fn give_back(&mut self) -> bool {
        self.prefixes.drop_all()
    }
}

impl<'a> Engine<'a> {
    /// Adds a text. It waits until the texts before it have been processed, and there are a lane
    /// and memory for it.
    ///
    /// # Errors
    ///
    /// If a field of the request is outside its range. The engine is as before.
    pub fn add(&mut self, request: Request) -> Result<RequestId, GenerateError> {
        let model = self.setup.model.config();
        request.validate(model)?;
        let (tokens, maximum) = (request.prompt.len(), self.setup.config.longest(model));
        if tokens > maximum {
            return Err(GenerateError::PromptTooLong { tokens, maximum });
        }
        let id = RequestId(self.requests);
        let text = Text::new(id, request);
        self.check_memory(&text)?;
        self.requests += 1;
        // Choices for one prompt come one after the other.
        let last = self.texts.last_key_value();
        let is_alike = |last: &Text| last.tokens == text.tokens && last.processed == 0;
        let like = last.filter(|(_, last)| is_alike(last) && self.setup.random_contexts.is_none());
        let like = like.map_or(id, |(_, last)| last.like);
        self.scheduler.add(NewTask {
            id,
            priority: text.request.priority.into(),
            prompt: text.prompt,
            all: text.most_tokens(),
            like,
        });
        self.texts.insert(id, Text { like, ..text });
        Ok(id)
    }

    /// Ends a text before its time; tokens that it has not yielded yet are dropped.
    ///
    /// # Errors
    ///
    /// If there is no such request, or no longer, or the device fails.
    ///
    /// # Example
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::Device;
    /// use ds4_model::generate::{Engine, EngineConfig, Request};
    /// use ds4_model::pipeline::Pipeline;
    ///
    /// let pipeline = Pipeline::open("../../assets/ds4-tiny".as_ref(), &Device::flex())?;
    /// let mut engine = Engine::new(&pipeline.model, EngineConfig::default())?;
    /// let prompt = pipeline.encode("And God said,")?;
    /// let kept = engine.add(Request::new(&prompt, 4))?;
    /// let left = engine.add(Request::new(&prompt, 9))?;
    /// engine.step()?;
    /// engine.abort(left)?;
    /// assert!(engine.progress(left).is_none());
    /// while !engine.is_idle() {
    ///     assert!(engine.step()?.iter().all(|output| output.request == kept));
    /// }
    /// // It has ended.
    /// assert!(engine.abort(kept).is_err());
    /// # }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn abort(&mut self, request: RequestId) -> Result<(), GenerateError> {
        let told = self.outputs.len();
        let mut is_known = self.texts.contains_key(&request);
        match self.lane(request) {
            Some((group, _)) => {
                if let Some(text) = self.texts.get_mut(&request) {
                    text.ended = true;
                }
                self.settle(group)?;
            }
            None => {
                self.scheduler.remove(request);
                self.texts.remove(&request);
            }
        }
        self.outputs.retain(|output| output.request != request);
        is_known |= told != self.outputs.len();
        match is_known {
            true => Ok(()),
            false => Err(GenerateError::UnknownRequest { request }),
        }
    }

    /// Processes prompts that wait, as many tokens as a chunk has, and chooses the next tokens of
    /// every text. Returns them, those of one text in order.
    ///
    /// Without texts, it does nothing. While prompts are processed, it may return nothing.
    ///
    /// # Errors
    ///
    /// If the device fails. After that, the engine is not to be used any more. What goes wrong with
    /// one text is in its [output](Output::token): among others that there is no memory for its
    /// caches, and no text that could leave some to it.
    pub fn step(&mut self) -> Result<Vec<Output>, GenerateError> {
        let stepped = self.step_once();
        stepped.map_err(|error| match self.spoiled.take() {
            Some(refusal) => recorder::spoiled(&refusal, error),
            None => error,
        })
    }

    fn step_once(&mut self) -> Result<Vec<Output>, GenerateError> {
        let lacking = self.lacking();
        let (scheduler, mut memory) = self.planning();
        let plan = scheduler.plan(&lacking, &mut memory);
        self.carry_out(plan.changes)?;
        for call in plan.calls {
            self.process(call)?;
        }
        let decoded = self.scheduler.decoded();
        for group in &decoded {
            self.provide(*group)?;
        }
        for group in decoded {
            self.decode(group)?;
        }
        let (scheduler, memory) = self.planning();
        let changes = scheduler.tidy(&memory);
        self.carry_out(changes)?;
        Ok(std::mem::take(&mut self.outputs))
    }

    /// The scheduler, and what it is told.
    fn planning(&mut self) -> (&mut Scheduler, KnownMemory<'_, 'a>) {
        let memory = KnownMemory {
            setup: &self.setup,
            groups: &mut self.groups,
            prefixes: &mut self.prefixes,
            texts: &self.texts,
        };
        (&mut self.scheduler, memory)
    }

    /// Texts that lack pages for their next steps, and how many.
    fn lacking(&self) -> Vec<(RequestId, usize)> {
        let groups = self.groups.iter();
        let lacking = groups.flat_map(|group| {
            let texts = group.texts(&self.texts);
            texts.filter_map(|(lane, text)| {
                let trunk = &group.lanes.caches().trunk;
                let needed = self.setup.needed(trunk.lengths()[lane], text.most_tokens());
                let pages = self.setup.pool.pages_for(needed);
                let missing = pages.saturating_sub(trunk.pages_of_sequence(lane));
                (missing > 0).then_some((text.id, missing))
            })
        });
        lacking.collect()
    }

    /// Gives the texts of a group the pages of their next steps, which are there.
    fn provide(&mut self, id: GroupId) -> Result<(), GenerateError> {
        for group in self.groups.iter_mut().filter(|group| group.id == id) {
            for (lane, id) in group.texts.iter().enumerate() {
                let Some(text) = id.and_then(|id| self.texts.get(&id)) else {
                    continue;
                };
                let length = group.lanes.lengths()[lane];
                let needed = self.setup.needed(length, text.most_tokens());
                group.lanes.provide(lane, needed)?;
            }
        }
        Ok(())
    }

    /// Carries out changes, up to one for which there is no memory. What follows from that one is
    /// not planned any more.
    fn carry_out(&mut self, changes: Vec<Change>) -> Result<(), GenerateError> {
        for change in changes {
            if self.change(change)? {
                continue;
            }
            let groups = self.groups.iter();
            let groups = groups.map(|group| (group.id, &group.texts[..]));
            self.scheduler.restore(groups);
            for (id, text) in &mut self.texts {
                if self.scheduler.place(*id).is_none() {
                    text.caches = None;
                }
            }
            return Ok(());
        }
        Ok(())
    }

    /// Carries out a change; `false` if there is no memory for it.
    fn change(&mut self, change: Change) -> Result<bool, GenerateError> {
        match change {
            Change::Make(id, lanes) => return self.make(id, lanes),
            Change::Arrange(id, kept) => return self.arrange(id, &kept),
            Change::Drop(id) => {
                for Group { lanes, .. } in self.groups.extract_if(.., |own| own.id == id) {
                    self.replays += lanes.replays();
                    let refusal = lanes.refusal().map(str::to_owned);
                    self.refusal = self.refusal.take().or(refusal);
                }
            }
            Change::Preempt(id) => self.preempt(id)?,
            Change::Fail { id, pages, .. } => self.fail(id, pages)?,
        }
        Ok(true)
    }

    /// Makes a group; `false` if there is no memory for it.
    fn make(&mut self, id: GroupId, lanes: usize) -> Result<bool, GenerateError> {
        // What could not be recorded once is not tried again.
        self.setup.config.graphs &= self.graph_refusal().is_none();
        let Some(own) = if_fitting(Lanes::new(&self.setup, lanes))? else {
            return Ok(false);
        };
        let index = self.groups.partition_point(|own| own.id < id);
        let group = Group {
            id,
            lanes: own,
            texts: vec![None; lanes],
        };
        self.groups.insert(index, group);
        Ok(true)
    }

    /// Makes these lanes of those of a group; `false` if there is no memory for them.
    fn arrange(&mut self, id: GroupId, kept: &[Option<usize>]) -> Result<bool, GenerateError> {
        self.settle(id)?;
        let index = self.index(id);
        let group = &mut self.groups[index];
        if if_fitting(group.settled().arrange(&self.setup, kept))?.is_none() {
            return Ok(false);
        }
        let texts = kept.iter().map(|lane| group.texts[(*lane)?]);
        group.texts = texts.collect();
        for id in group.texts.iter().flatten() {
            if let Some(text) = self.texts.get_mut(id) {
                text.last_row = None;
            }
        }
        let all: Vec<usize> = (0..kept.len()).collect();
        self.refresh(id, &all)?;
        Ok(true)
    }

    /// Takes all from a text but its tokens, which are processed again later.
    fn preempt(&mut self, id: RequestId) -> Result<(), GenerateError> {
        let lane = self.lane(id);
        if let Some((group, _)) = lane {
            self.settle(group)?;
        }
        // It may have ended in a step that was ahead.
        let Some(text) = self.texts.get_mut(&id) else {
            return Ok(());
        };
        text.caches = None;
        text.marks.clear();
        self.scheduler.set_tokens(id, text.tokens.len());
        let Some((group, lane)) = lane else {
            return Ok(());
        };
        let own = self.groups.iter_mut().find(|own| own.id == group);
        let own = own.expect("that of its lane");
        text.constraint = own.settled().take_constraint(lane);
        own.texts[lane] = None;
        own.settled().vacate(lane)?;
        self.refresh(group, &[])
    }

    /// Ends a text for which there is no memory: so many pages are missing, or what else it takes.
    fn fail(&mut self, id: RequestId, pages: usize) -> Result<(), GenerateError> {
        let Some(text) = self.texts.get(&id) else {
            return Ok(());
        };
        let positions = self.setup.needed(text.tokens.len(), text.most_tokens());
        let error = match pages {
            0 => GenerateError::Cache(CacheError::OutOfMemory {
                positions,
                bytes: self.setup.bytes_of([2, 0])?,
            }),
            _ => self.missing(positions, pages),
        };
        if let Some(text) = self.texts.get_mut(&id) {
            self.outputs.push(text.fail(error));
        }
        match self.lane(id) {
            Some((group, _)) => self.settle(group),
            None => {
                self.texts.remove(&id);
                Ok(())
            }
        }
    }

    /// Checks that there may be pages for the beginning of a text.
    fn check_memory(&self, text: &Text) -> Result<(), GenerateError> {
        let positions = self.setup.needed(text.tokens.len(), text.most_tokens());
        let pages = self.setup.pool.pages_for(positions);
        match pages.saturating_sub(self.setup.budget.pages) {
            0 => Ok(()),
            missing => Err(self.missing(positions, missing)),
        }
    }

    /// Why a text ends that lacks pages.
    fn missing(&self, positions: usize, missing: usize) -> GenerateError {
        GenerateError::CacheMemory {
            positions,
            pages: self.setup.pool.pages_for(positions),
            missing,
        }
    }

    /// Takes all from all texts but their tokens, after a recording of a group has failed and has
    /// spoiled what is in pages. They are processed again.
    pub(super) fn start_over(&mut self, id: GroupId) -> Result<(), GenerateError> {
        // Steps of other groups were done before.
        let others: Vec<GroupId> = self.groups.iter().map(|group| group.id).collect();
        for other in others.into_iter().filter(|other| *other != id) {
            let index = self.index(other);
            while let Some(outcome) = self.groups[index].lanes.drain(&self.setup)? {
                self.take(other, &outcome)?;
            }
        }
        for Group { lanes, texts, .. } in std::mem::take(&mut self.groups) {
            self.replays += lanes.replays();
            self.refusal = self.refusal.take().or(lanes.refusal().map(str::to_owned));
            let (mut constraints, spoiled) = lanes.into_parts();
            self.spoiled = self.spoiled.take().or(spoiled);
            for (lane, id) in texts.iter().enumerate() {
                if let Some(text) = id.and_then(|id| self.texts.get_mut(&id)) {
                    text.constraint = constraints.take(lane);
                }
            }
        }
        self.texts.retain(|id, text| {
            if text.ended {
                self.scheduler.remove(*id);
            }
            self.scheduler.set_tokens(*id, text.tokens.len());
            (text.caches, text.last_row) = (None, None);
            text.marks.clear();
            !text.ended
        });
        self.scheduler.start_over();
        self.prefixes.drop_all();
        self.setup.pool = new_pool(self.setup.model, &self.setup.config);
        Ok(())
    }

    /// Ends with all texts, and gives the memory of caches and recordings back to the devices, from
    /// which another engine may take it.
    pub fn give_memory_back(self) {
        let devices = self.setup.step_devices();
        drop(self);
        devices.iter().for_each(Device::memory_cleanup);
    }
}
