//! What goes from one device to another in the steps of a group of lanes whose layers are divided.
//!
//! The streams go from each device to the next. What the last device has chosen, and the lengths of
//! the texts, go back to all others, before the next step begins. Recorded steps are replayed
//! device by device, and what is moved goes in between: it arrives in new memory, which cannot be
//! recorded, and is copied to where the next recording reads.
//!
//! A device that receives something does its later work after it has arrived. So where groups of
//! lanes share the devices, what goes back is put off until the next group has begun its step: the
//! first device has work then, while the last one is still busy.
//!
//! Devices that have parts of every layer exchange all of this within a step, which is recorded
//! with it.

use std::thread::ThreadId;

use burn::tensor::{Device, Int, Tensor};
use burn_ds4_ops::transfer::{transfer, transfer_in_turn};

use super::super::recorder::{launches, note_launch};
use super::super::results::PartResults;
use super::super::setup::Setup;
use crate::cache::Cache;
use crate::model::passed_columns;

#[derive(Debug)]
pub(super) struct Links {
    /// One for each part of a step.
    devices: Vec<Device>,
    /// The inputs of the lanes on each device but the last, which has the lanes' own. Taken while
    /// they are written.
    inputs: Vec<Option<Tensor<2, Int>>>,
    /// Where each device but the first has what was passed to it last. Taken while it is written.
    arrivals: Vec<Option<Tensor<2>>>,
    /// Whether what goes back is put off.
    puts_off: bool,
    /// What has not gone back yet.
    pending: Option<Tensor<1, Int>>,
    /// What has arrived last, by device, and what was made of it to be read. A device receives
    /// beside its work. So this must not be in the memory of what arrives next, which may be for
    /// another group: it may not have been read then.
    held_rows: Vec<Option<Tensor<2>>>,
    held_inputs: Vec<Option<[Tensor<1, Int>; 3]>>,
    /// How much this thread had [launched](launches) when all devices had done what they were given
    /// before.
    done: Option<(ThreadId, u64)>,
}

impl Links {
    pub(super) fn new(setup: &Setup, lanes: usize) -> Self {
        let devices = setup.step_devices();
        let (_, others) = devices.split_last().expect("there is at least one run");
        let columns = 1 + setup.config.drafts;
        let inputs = others.iter();
        let inputs = inputs.map(|device| Some(Tensor::zeros([lanes, columns], device)));
        let others = others.len();
        Self {
            inputs: inputs.collect(),
            arrivals: Vec::new(),
            puts_off: setup.ways() > 1,
            pending: None,
            held_rows: vec![None; others],
            held_inputs: vec![None; others],
            done: None,
            devices,
        }
    }

    /// The devices, in the order of a step.
    pub(super) fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Whether there is more than one part of a step.
    pub(super) fn is_divided(&self) -> bool {
        self.devices.len() > 1
    }

    /// The inputs on a device other than the last.
    pub(super) fn inputs(&self, part: usize) -> Tensor<2, Int> {
        self.inputs[part].clone().expect("they are put back")
    }

    /// Makes these lanes of those that there are, `None` for one that is vacant.
    pub(super) fn arrange(&mut self, lanes: &[Option<usize>]) {
        self.arrivals.clear();
        for inputs in &mut self.inputs {
            *inputs = inputs.take().map(|inputs| arranged(inputs, lanes));
        }
    }

    /// Sets the inputs of a lane (`[1, columns]`).
    pub(super) fn enter(&mut self, lane: usize, own: &Tensor<2, Int>) {
        for (inputs, device) in self.inputs.iter_mut().zip(&self.devices) {
            let known = inputs.take().expect("they are put back");
            let [_, columns] = known.dims();
            let own = transfer(own.clone(), device).cast(known.dtype());
            *inputs = Some(known.slice_assign([lane..lane + 1, 0..columns], own));
        }
    }

    /// Makes the places where recorded steps of up to so many tokens find what was passed.
    pub(super) fn prepare(&mut self, setup: &Setup, tokens: usize) {
        // Those of recordings that there are stay in place.
        if !self.arrivals.is_empty() {
            return;
        }
        let runs = setup.model.placement.runs().iter().skip(1);
        let dtype = setup.model.embedding.val().dtype();
        let arrivals = runs.map(|run| {
            let before = |layer: &&usize| **layer < run.layers.start;
            let taps = setup.taps().iter().filter(before).count();
            let columns = passed_columns(setup.model.config(), taps);
            Some(Tensor::zeros([tokens, columns], (&run.device, dtype)))
        });
        self.arrivals = arrivals.collect();
    }

    /// Passes on what a launched part of a step results in to the device of the next part, and
    /// returns it there: where a recorded step would have it, so that a launched one takes as much
    /// memory.
    pub(super) fn deliver(&mut self, rows: Tensor<2>, part: usize) -> Tensor<2> {
        let arrived = transfer(rows, &self.devices[part]);
        let [tokens, _] = arrived.dims();
        let place = self.arrivals.get(part - 1).and_then(Option::as_ref);
        match place.is_some_and(|place| place.dims()[0] >= tokens) {
            true => {
                self.put(part, arrived);
                self.arrival(part, tokens)
            }
            false => arrived,
        }
    }

    fn put(&mut self, part: usize, arrived: Tensor<2>) {
        let place = self.arrivals[part - 1].take().expect("it is put back");
        let [rows, columns] = arrived.dims();
        let place = place.slice_assign([0..rows, 0..columns], arrived);
        self.arrivals[part - 1] = Some(place);
    }

    /// What a device other than the first was passed of so many tokens.
    pub(super) fn arrival(&self, part: usize, tokens: usize) -> Tensor<2> {
        let place = self.arrivals[part - 1].clone().expect("it is put back");
        match place.dims()[0] == tokens {
            true => place,
            false => place.narrow(0, 0, tokens),
        }
    }

    /// Passes on what a recorded part of a step results in, after its replay. With the last part,
    /// `done` means "as of the end of this part": what the devices were given until now, they have
    /// done by then, and not yet when this returns.
    pub(super) fn follow(&mut self, part: usize, results: &PartResults) {
        match results {
            PartResults::Passed(rows) => {
                let arrived = self.moved((**rows).clone(), part + 1);
                self.held_rows[part] = Some(arrived.clone());
                self.put(part + 1, arrived);
            }
            PartResults::Exchanged => {}
            PartResults::Chosen(results) => {
                self.pending = results.next.clone();
                self.done = Some(launches());
            }
        }
    }

    /// Hands back what a replay has left, unless that is put off. The host has begun to read the
    /// results: it may read copies, in memory that the next part of another device may be sent to.
    pub(super) fn hand_back_at_once(&mut self, trunk: &mut Cache) {
        if !self.puts_off {
            self.catch_up(trunk);
        }
    }

    /// Hands back what was put off.
    pub(super) fn catch_up(&mut self, trunk: &mut Cache) {
        if let Some(next) = self.pending.take() {
            let in_turn = self.is_in_turn();
            if !in_turn {
                // The other groups' devices have this to do as well before they are in turn.
                note_launch();
            }
            self.hand_back(Some(&next), trunk, in_turn);
        }
    }

    /// Hands what the last device has for the next step to all others: `next` is the inputs of all
    /// lanes, `lanes * columns`, and the length of each.
    pub(super) fn hand_back(
        &mut self,
        next: Option<&Tensor<1, Int>>,
        trunk: &mut Cache,
        in_turn: bool,
    ) {
        let Some(next) = next else {
            return;
        };
        for part in 0..self.inputs.len() {
            let device = &self.devices[part];
            let next = match in_turn {
                // SAFETY: what the device was given waits for the last device's step before.
                true => unsafe { transfer_in_turn(next.clone(), device) },
                false => transfer(next.clone(), device),
            };
            let [inputs, lengths] = self.take_back(part, next.clone(), trunk);
            self.held_inputs[part] = Some([next, inputs, lengths]);
        }
    }

    /// Writes what a device other than the last has for the next step, as
    /// [`hand_back`](Self::hand_back) has it. Returns the inputs and the lengths that it reads:
    /// copies, since they do not begin and end where the device aligns memory. `next` and the
    /// inputs are of the default integer type, which is that of all devices: the cast changes
    /// nothing.
    pub(super) fn take_back(
        &mut self,
        part: usize,
        next: Tensor<1, Int>,
        trunk: &mut Cache,
    ) -> [Tensor<1, Int>; 2] {
        let known = self.inputs[part].take().expect("they are put back");
        let [lanes, columns] = known.dims();
        let inputs = next.clone().narrow(0, 0, lanes * columns);
        let inputs = inputs.cast(known.dtype());
        let lengths = next.narrow(0, lanes * columns, lanes);
        let rows = inputs.clone().reshape([lanes, columns]);
        self.inputs[part] = Some(known.slice_assign([0..lanes, 0..columns], rows));
        trunk.set_start(part, lengths.clone());
        [inputs, lengths]
    }

    fn moved(&self, rows: Tensor<2>, part: usize) -> Tensor<2> {
        let device = &self.devices[part];
        match self.is_in_turn() {
            // SAFETY: what the device was given ends before the step that `rows` are of.
            true => unsafe { transfer_in_turn(rows, device) },
            false => transfer(rows, device),
        }
    }

    /// Whether nothing but replays, each of which waits for the one before, has been launched since
    /// all devices had done what they were given.
    fn is_in_turn(&self) -> bool {
        self.done == Some(launches())
    }
}

/// Rows of these lanes, zeros for one that is vacant.
pub(super) fn arranged(rows: Tensor<2, Int>, lanes: &[Option<usize>]) -> Tensor<2, Int> {
    let none = rows.clone().narrow(0, 0, 1).zeros_like();
    let of = |lane: &Option<usize>| match lane {
        Some(lane) => rows.clone().narrow(0, *lane, 1),
        None => none.clone(),
    };
    Tensor::cat(lanes.iter().map(of).collect(), 0)
}
