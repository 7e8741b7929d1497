//! Which texts get lanes, and the memory for them.

use super::config::Request;
use super::constraint::LaneConstraint;
use super::group::Group;
use super::lanes::{Entry, Lanes};
use super::memory::if_fitting;
use super::prompt::Prompt;
use super::setup::upload;
use super::state::Engine;
use super::text::{Output, Text};
use crate::cache::CacheError;
use crate::generate::error::GenerateError;
use crate::generate::request_id::RequestId;

/// Lanes are roomy if they are so many times as many as their texts.
const ROOMY: usize = 4;
/// Steps for which lanes are roomy before they become fewer: what is recorded is recorded anew.
const ROOMY_STEPS: usize = 32;

/// The caches in which a prompt is processed.
#[derive(Clone, Copy, Debug)]
enum PromptCaches {
    /// Those that there are, of so many bytes.
    Made(usize),
    /// Those that have to be made, of so many positions.
    Wanted(usize),
}

impl Engine<'_> {
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
        self.prompts.push_back(Prompt::new(text));
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
        let (told, waiting) = (self.outputs.len(), self.prompts.len());
        self.prompts.retain(|prompt| prompt.text.id != request);
        let known = match self.place(request) {
            Some((group, lane)) => {
                self.settle(group)?;
                if let Some(text) = &mut self.groups[group].texts[lane] {
                    text.ended = true;
                }
                self.vacate_ended(group)?;
                true
            }
            None => false,
        };
        self.outputs.retain(|output| output.request != request);
        let known = known || (told, waiting) != (self.outputs.len(), self.prompts.len());
        match known {
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
        self.process_prompts()?;
        let keys: Vec<(usize, usize)> = self
            .groups
            .iter()
            .map(|group| (group.lanes.capacity(), group.way))
            .collect();
        for (capacity, way) in keys {
            self.move_grown(capacity, way)?;
            if let Some(group) = self.group_of(capacity, way) {
                self.decode(group)?;
                self.shrink(group)?;
            }
        }
        // One lane of the smallest size is kept for the next text, with what is recorded, and the
        // lanes of a prompt in progress.
        let base = self.capacity_for(1);
        let begun = self.prompts.front().filter(|prompt| prompt.has_begun());
        let next = begun.map(|prompt| self.capacity_of(&prompt.text));
        self.drop_vacant(|group| {
            let capacity = group.lanes.capacity();
            next == Some(capacity) || capacity == base && group.texts.len() == 1
        });
        Ok(std::mem::take(&mut self.outputs))
    }

    /// Processes prompts, as many tokens as a chunk has at most.
    pub(super) fn process_prompts(&mut self) -> Result<(), GenerateError> {
        let size = self.setup.config.prefill_chunk;
        let mut left = size;
        while let Some(mut prompt) = self.prompts.pop_front() {
            let has_lane = self.running() < self.setup.config.lanes;
            let tokens = prompt.text.tokens.len();
            let own = match prompt.has_begun() {
                true => PromptCaches::Made(prompt.bytes()),
                false => PromptCaches::Wanted(tokens),
            };
            // Steps go on while tables for long texts are worked out.
            let capacity = self.capacity_of(&prompt.text);
            let is_ready = self.running() == 0 || self.setup.has_tables_ready(capacity);
            let lane = match has_lane && is_ready {
                true => self.vacant_lane(capacity, own)?,
                false => None,
            };
            let has_begun = match (lane, prompt.has_begun()) {
                (None, _) => false,
                (Some(_), true) => true,
                (Some(_), false) => {
                    let begun = prompt.begin(&self.setup, &mut self.prefixes);
                    if_fitting(begun)?.is_some()
                }
            };
            let Some(lane) = lane.filter(|_| has_begun) else {
                if self.running() > 0 {
                    // Another text may leave what is missing.
                    self.prompts.push_front(prompt);
                    break;
                }
                if self.prefixes.drop_all() {
                    self.prompts.push_front(prompt);
                } else {
                    self.fail_prompt(prompt)?;
                }
                continue;
            };
            let count = prompt.next_chunk(size, &self.prefixes);
            if count > left {
                self.prompts.push_front(prompt);
                break;
            }
            left -= count;
            match prompt.process_chunk(&self.setup, &self.prefixes)? {
                true => self.enter(prompt, lane)?,
                false => self.prompts.push_front(prompt),
            }
        }
        Ok(())
    }

    /// Ends a text for which there is no memory, though nothing else is in use.
    fn fail_prompt(&mut self, mut prompt: Prompt) -> Result<(), GenerateError> {
        let capacity = self.capacity_of(&prompt.text);
        let bytes = self.setup.bytes(capacity)?;
        let bytes = bytes.saturating_add(self.setup.bytes(prompt.text.tokens.len())?);
        let error = self.memory_error(prompt.text.needed(self.most_positions()), bytes);
        self.outputs.push(prompt.text.fail(error));
        Ok(())
    }

    /// Gives a lane to a text whose prompt is processed.
    fn enter(
        &mut self,
        prompt: Prompt,
        (group, lane): (usize, usize),
    ) -> Result<(), GenerateError> {
        let (mut text, caches) = prompt.end();
        let constraint = text.request.constraint.take();
        let last = text.tokens.last().map(|token| *token as i32);
        let no_drafts = std::iter::repeat_n(-1, self.setup.config.drafts);
        let inputs = upload(last.into_iter().chain(no_drafts), self.setup.device());
        self.settle(group)?;
        let entry = Entry {
            caches: &caches,
            from: 0,
            inputs,
            constraint: constraint.map(LaneConstraint::new),
        };
        self.groups[group].lanes.enter(lane, entry)?;
        self.groups[group].texts[lane] = Some(text);
        self.vacate_ended(group)?;
        self.refresh(group, lane..lane + 1)
    }

    /// Positions of the lane that a text begins in.
    fn capacity_of(&self, text: &Text) -> usize {
        self.capacity_for(text.needed(self.most_positions()))
    }

    /// A vacant lane of so many positions, `None` if there is no memory yet for it and the prompt
    /// of its text.
    fn vacant_lane(
        &mut self,
        capacity: usize,
        prompt: PromptCaches,
    ) -> Result<Option<(usize, usize)>, GenerateError> {
        let way = self.emptiest(capacity);
        let Some(group) = self.group_of(capacity, way) else {
            if !self.has_memory(capacity, [0, 1], prompt)? {
                // There may be a lane in another group.
                return match self.has_memory(capacity, [0, 0], prompt)? {
                    true => Ok(self.vacant_of(capacity)),
                    false => Ok(None),
                };
            }
            let after = self
                .groups
                .iter()
                .position(|group| group.lanes.capacity() > capacity);
            let group = after.unwrap_or(self.groups.len());
            // What could not be recorded once is not tried again.
            self.setup.config.graphs &= self.graph_refusal().is_none();
            let Some(lanes) = if_fitting(Lanes::new(&self.setup, 1, capacity))? else {
                return Ok(None);
            };
            // Those of the next size may be needed soon.
            self.setup.has_tables_ready(self.capacity_for(capacity + 1));
            self.groups.insert(group, Group::new(way, lanes));
            return Ok(Some((group, 0)));
        };
        let texts = &self.groups[group].texts;
        let (known, vacant) = (texts.len(), texts.iter().position(Option::is_none));
        let most = self.setup.config.lanes.div_ceil(self.setup.ways());
        let mut lanes = match vacant {
            Some(_) => known,
            None => (2 * known).min(most),
        };
        if !self.has_memory(capacity, [known, lanes], prompt)? {
            // One more, if there is no memory for twice as many.
            let doubled = std::mem::replace(&mut lanes, known + 1);
            if doubled <= lanes || !self.has_memory(capacity, [known, lanes], prompt)? {
                return Ok(None);
            }
        }
        // Others may have been dropped.
        let Some(group) = self.group_of(capacity, way) else {
            return Ok(None);
        };
        if let Some(lane) = vacant {
            return Ok(Some((group, lane)));
        }
        if !self.resize(group, lanes)? {
            return Ok(None);
        }
        let vacant = self.groups[group].texts.iter().position(Option::is_none);
        Ok(vacant.map(|lane| (group, lane)))
    }

    /// Makes so many lanes of those of a group, of which the first have its texts; `false` if there
    /// is no memory for them.
    fn resize(&mut self, group: usize, lanes: usize) -> Result<bool, GenerateError> {
        self.settle(group)?;
        self.vacate_ended(group)?;
        let Group {
            lanes: own, texts, ..
        } = &mut self.groups[group];
        let known = texts.iter().enumerate();
        let known = known.filter_map(|(lane, text)| text.is_some().then_some(lane));
        let mut kept: Vec<Option<usize>> = known.map(Some).collect();
        kept.resize(lanes, None);
        if if_fitting(own.arrange(&self.setup, &kept))?.is_none() {
            return Ok(false);
        }
        texts.retain(Option::is_some);
        texts.resize_with(lanes, || None);
        for text in texts.iter_mut().flatten() {
            text.last_row = None;
        }
        self.refresh(group, 0..lanes)?;
        Ok(true)
    }

    /// Makes the lanes of a group fewer, if few of them have had texts for some time and nobody
    /// waits for one.
    fn shrink(&mut self, group: usize) -> Result<(), GenerateError> {
        let own = &mut self.groups[group];
        let (texts, lanes) = (own.texts().count(), own.texts.len());
        let is_roomy = texts > 0 && texts * ROOMY <= lanes && self.prompts.is_empty();
        own.roomy_steps = if is_roomy { own.roomy_steps + 1 } else { 0 };
        if own.roomy_steps < ROOMY_STEPS {
            return Ok(());
        }
        own.roomy_steps = 0;
        let fewer = texts.next_power_of_two();
        if self
            .setup
            .has_place(&[[self.groups[group].lanes.capacity(), fewer]])?
        {
            self.resize(group, fewer)?;
        }
        Ok(())
    }

    /// Any vacant lane with so many positions.
    fn vacant_of(&self, capacity: usize) -> Option<(usize, usize)> {
        let groups = self.groups.iter().enumerate();
        let mut groups = groups.filter(|(_, group)| group.lanes.capacity() == capacity);
        groups.find_map(|(index, group)| {
            let vacant = group.texts.iter().position(Option::is_none);
            vacant.map(|lane| (index, lane))
        })
    }

    /// Of the groups of lanes with so many positions, the first that has the fewest texts.
    fn emptiest(&self, capacity: usize) -> usize {
        let texts = |way: &usize| {
            let group = self.group_of(capacity, *way);
            group.map_or(0, |group| self.groups[group].texts().count())
        };
        let ways = 0..self.setup.ways();
        ways.min_by_key(texts).unwrap_or(0)
    }

    /// Moves texts for which a step has too few positions to larger lanes.
    pub(super) fn move_grown(&mut self, capacity: usize, way: usize) -> Result<(), GenerateError> {
        let step = self.most_positions();
        let group = self.group_of(capacity, way);
        let Some(group) = group.map(|group| &self.groups[group]) else {
            return Ok(());
        };
        if !group.lanes.is_settled() || capacity == self.max_positions() {
            return Ok(());
        }
        let texts = group.texts.iter().zip(group.lanes.lengths());
        let texts = texts.filter_map(|(text, length)| Some((text.as_ref()?, *length)));
        let grown = texts.filter(|(text, length)| {
            let is_full = length + step > capacity;
            is_full && text.needed(step) > capacity
        });
        let grown: Vec<(RequestId, usize)> =
            grown.map(|(text, length)| (text.id, length)).collect();
        let next = self.capacity_for(capacity + 1);
        for (id, length) in grown {
            let none = PromptCaches::Made(0);
            let mut larger = self.vacant_lane(next, none)?;
            if larger.is_none() && self.prefixes.drop_all() {
                larger = self.vacant_lane(next, none)?;
            }
            if larger.is_none() && length + self.setup.positions(0) <= capacity {
                // A step of fewer drafts has place yet.
                continue;
            }
            // Groups may have come and gone.
            let Some((group, lane)) = self.place(id) else {
                continue;
            };
            if let Some(text) = self.groups[group].texts[lane].take() {
                self.move_text(text, (group, lane), larger)?;
            }
        }
        Ok(())
    }

    /// Moves a text to a larger lane or, where there is no memory for one, ends it.
    fn move_text(
        &mut self,
        mut text: Text,
        (group, lane): (usize, usize),
        place: Option<(usize, usize)>,
    ) -> Result<(), GenerateError> {
        match place {
            None => {
                // More than the lane has that it leaves.
                let needed = self.groups[group].lanes.capacity() + 1;
                let bytes = self.setup.bytes(self.capacity_for(needed))?;
                let error = self.memory_error(needed, bytes);
                self.outputs.push(text.fail(error));
            }
            Some((new_group, new_lane)) => {
                self.settle(new_group)?;
                let groups = self.groups.get_disjoint_mut([group, new_group]);
                let [old, new] = groups.expect("lanes of another size");
                old.lanes.catch_up();
                let constraint = old.lanes.take_constraint(lane);
                let entry = Entry {
                    caches: old.lanes.caches(),
                    from: lane,
                    inputs: old.lanes.input(lane),
                    constraint,
                };
                new.lanes.enter(new_lane, entry)?;
                text.last_row = None;
                new.texts[new_lane] = Some(text);
                self.vacate_ended(new_group)?;
                self.refresh(new_group, new_lane..new_lane + 1)?;
            }
        }
        self.groups[group].lanes.vacate(lane)?;
        self.refresh(group, 0..0)
    }

    /// Drops groups without texts, but for those that are to be kept. What is known of their
    /// recordings stays.
    pub(super) fn drop_vacant(&mut self, is_kept: impl Fn(&Group) -> bool) {
        let is_needed = |group: &mut Group| group.texts().next().is_some() || is_kept(group);
        for Group { lanes, .. } in self.groups.extract_if(.., |group| !is_needed(group)) {
            self.replays += lanes.replays();
            self.refusal = self.refusal.take().or(lanes.refusal().map(str::to_owned));
        }
    }

    /// Checks that a text fits the memory by itself, beside its prompt's own caches.
    pub(super) fn check_memory(&self, text: &Text) -> Result<(), GenerateError> {
        let positions = text.needed(self.most_positions());
        let capacity = self.capacity_for(positions);
        let prompt = self.setup.bytes(text.tokens.len())?;
        let bytes = self.setup.bytes(capacity)?.saturating_add(prompt);
        match self.setup.config.cache_bytes {
            Some(maximum) if bytes > maximum => Err(self.memory_error(positions, bytes)),
            _ => Ok(()),
        }
    }

    /// Why a text ends that needs caches of so many bytes: they are more than any text may have, or
    /// than is left.
    fn memory_error(&self, positions: usize, needed: usize) -> GenerateError {
        match self.setup.config.cache_bytes {
            Some(maximum) => GenerateError::CacheMemory {
                positions,
                needed,
                maximum,
            },
            None => GenerateError::Cache(CacheError::OutOfMemory {
                positions,
                bytes: needed,
            }),
        }
    }

    /// Whether there is memory for lanes of a capacity to become more, after lanes that are not in
    /// use are dropped: groups may have other indices then.
    fn has_memory(
        &mut self,
        capacity: usize,
        [known, lanes]: [usize; 2],
        prompt: PromptCaches,
    ) -> Result<bool, GenerateError> {
        let (more, tokens) = match prompt {
            PromptCaches::Made(bytes) => (bytes, None),
            PromptCaches::Wanted(tokens) => (self.setup.bytes(tokens)?, Some(tokens)),
        };
        let maximum = self.setup.config.cache_bytes.unwrap_or(usize::MAX);
        let needed = self.setup.bytes(capacity)?.saturating_mul(lanes - known);
        let needed = needed.saturating_add(more);
        // All lanes are copied where they become more.
        let made = if known == lanes { 0 } else { lanes };
        let caches = [
            [capacity, made],
            [tokens.unwrap_or(1), tokens.iter().count()],
        ];
        let fits = |engine: &Self| {
            let within = engine.cache_bytes().saturating_add(needed) <= maximum;
            Ok::<bool, GenerateError>(within && engine.setup.has_place(&caches)?)
        };
        if !fits(self)? {
            self.drop_vacant(|group| group.lanes.capacity() == capacity);
        }
        fits(self)
    }
}
