//! Exchanges through each other's memory.

mod access;
mod kernel;

use std::any::Any;
use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

use burn::backend::{DispatchDevice, StreamId, TensorMetadata};
use burn::tensor::{DType, Device, Shape, Tensor};
use burn_cubecl::CubeDevice;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::future::block_on;
use cubecl::prelude::*;
use cubecl::server::{Handle, ServerError};

use super::{Combine, Exchanged, GroupError, WORD};
use crate::launching::address_type;
use kernel::{
    Element, ExchangeBlueprint, MAX_UNITS, STATE_WORDS, UNIT_BYTES, UNIT_WORDS, exchange_kernel,
};

pub(super) use access::enable;

/// Units of a cube: few, so that a short exchange is on several SMs.
const UNITS: u32 = 128;

/// Memory of a device that the others write to.
struct Inbox {
    client: Client,
    memory: Handle,
    /// Keeps the memory where it is. CubeCL may move it otherwise, but the others know its address.
    _in_place: Box<dyn Any>,
    words: usize,
    /// Where the others' words begin in the memory of each rank.
    places: Handle,
}

/// One of each device. Others write to them until all that was launched is done, so their memory
/// must be in use for as long.
struct Inboxes {
    all: Vec<Inbox>,
    /// On which their thread launches.
    stream: StreamId,
}

impl Drop for Inboxes {
    /// Waits, at most for as long as a device waits for another. On a thread of its own: this one
    /// may be ending, and has no state of its own any more that waiting would need.
    fn drop(&mut self) {
        let (clients, stream) = (self.clients(), self.stream);
        let waiting = std::thread::Builder::new()
            .spawn(move || stream.executes(|| clients.iter().for_each(wait)));
        // What has failed is told by whoever reads it.
        let _ = waiting.map(std::thread::JoinHandle::join);
    }
}

/// Waits until a device has done all that was launched on the current stream.
fn wait(client: &Client) {
    // As above.
    let _ = block_on(client.sync());
}

/// The devices of a group, and a stream: what one thread launches has its own order.
type Key = (Vec<CubeDevice>, StreamId);

thread_local! {
    /// The inboxes of the devices. Groups of the same devices share them.
    static INBOXES: RefCell<HashMap<Key, Inboxes>> = RefCell::default();
}

/// Drops the current thread's inboxes, so that they are created again when they are next needed.
pub(crate) fn forget() {
    INBOXES.with_borrow_mut(HashMap::clear);
}

/// Waits until the devices have been given all that was launched: the host holds nothing back, and
/// all kernels are compiled. A `flush` would also free memory, and wait for the device to do so,
/// which may wait for another one.
fn hand_over(inboxes: &[Inbox]) {
    for inbox in inboxes {
        // As above.
        let _ = inbox.client.check([]);
    }
}

fn key(devices: &[Device]) -> Key {
    let devices = devices.iter().map(|device| match device.as_dispatch() {
        DispatchDevice::Cube(device) => device.clone(),
        #[allow(unreachable_patterns)]
        _ => unreachable!("only CUDA devices have inboxes"),
    });
    (devices.collect(), StreamId::current())
}

impl Inboxes {
    fn clients(&self) -> Vec<Client> {
        self.all.iter().map(|inbox| inbox.client.clone()).collect()
    }

    /// One for each device, empty. The host waits for them: another device may write to one as soon
    /// as it is known.
    fn new((devices, stream): &Key) -> Result<Self, GroupError> {
        let words =
            STATE_WORDS as usize + (2 * devices.len() * (MAX_UNITS * UNIT_BYTES) as usize) / WORD;
        let mut inboxes = Vec::new();
        let mut starts = Vec::new();
        for device in devices {
            let client = device.client();
            let memory = client.create_from_slice(&vec![0; WORD * words]);
            let placed = client.check([&memory]);
            let placed = placed.and_then(|()| access::in_place(&client, &memory));
            let (start, _in_place) = placed.map_err(|error| no_inbox(device, &error))?;
            let others = start + u64::from(STATE_WORDS) * WORD as u64;
            starts.extend(others.to_le_bytes());
            inboxes.push((client, memory, _in_place));
        }
        let inboxes = inboxes.into_iter().zip(devices);
        let all: Result<Vec<Inbox>, GroupError> = inboxes
            .map(|((client, memory, _in_place), device)| {
                let places = client.create_from_slice(&starts);
                let placed = client.check([&places]);
                placed.map_err(|error| no_inbox(device, &error))?;
                Ok(Inbox {
                    places,
                    client,
                    memory,
                    _in_place,
                    words,
                })
            })
            .collect();
        let inboxes = Self {
            all: all?,
            stream: *stream,
        };
        inboxes.clients().iter().for_each(wait);
        Ok(inboxes)
    }
}

fn no_inbox(device: &CubeDevice, error: &ServerError) -> GroupError {
    GroupError::NoInbox {
        device: format!("{device:?}"),
        reason: error.to_string(),
    }
}

/// Makes the current thread's inboxes of the devices, unless they are there.
pub(super) fn prepare(devices: &[Device]) -> Result<(), GroupError> {
    INBOXES.with_borrow_mut(|all| {
        if let Entry::Vacant(place) = all.entry(key(devices)) {
            let inboxes = Inboxes::new(place.key())?;
            place.insert(inboxes);
        }
        Ok(())
    })
}

/// Combines what the ranks from `first` on have with what all others have.
pub(super) fn exchange<const D: usize, K: Exchanged>(
    devices: &[Device],
    first: usize,
    tensors: Vec<Tensor<D, K>>,
    combine: Combine,
) -> Result<Vec<Tensor<D, K>>, GroupError> {
    prepare(devices)?;
    let own = tensors.into_iter();
    let own = own.map(|tensor| K::into_cube(tensor).expect("a tensor of a CUDA device"));
    let own = own.map(into_contiguous).collect();
    let combined = INBOXES.with_borrow(|all| {
        let inboxes = &all[&key(devices)].all;
        exchange_in(inboxes, first, own, combine)
    });
    Ok(combined.into_iter().map(K::from_cube).collect())
}

fn exchange_in(
    inboxes: &[Inbox],
    first: usize,
    tensors: Vec<CubeTensor>,
    combine: Combine,
) -> Vec<CubeTensor> {
    let ranks = inboxes.len();
    let is_whole = tensors.len() == ranks;
    let outputs: Vec<CubeTensor> = tensors.iter().map(|x| output(x, ranks, combine)).collect();
    // What comes before may compile kernels, which takes seconds, and allocate or free memory, for
    // which the driver waits for devices: it must be done before one waits for another. While a
    // device records, it is alone, and nothing waits.
    if is_whole {
        hand_over(inboxes);
    }
    let words = tensors[0].shape().num_elements() * tensors[0].dtype.size() / WORD;
    let step = (MAX_UNITS * UNIT_WORDS) as usize;
    for begin in (0..words).step_by(step) {
        let own = tensors.iter().zip(&outputs).zip(first..);
        for ((x, output), rank) in own {
            let blueprint = ExchangeBlueprint {
                rank: rank as u32,
                ranks: ranks as u32,
                combine,
                element: element(x.dtype),
            };
            let units = (words - begin).min(step).div_ceil(UNIT_WORDS as usize);
            launch(
                &inboxes[rank],
                [x, output],
                [words, begin, units],
                blueprint,
            );
        }
    }
    // Now they wait for each other.
    if is_whole {
        hand_over(inboxes);
    }
    outputs
}

fn launch(
    inbox: &Inbox,
    [x, output]: [&CubeTensor; 2],
    [words, begin, units]: [usize; 3],
    blueprint: ExchangeBlueprint,
) {
    let all = output.shape().num_elements() * output.dtype.size() / WORD;
    let ranks = blueprint.ranks as usize;
    // SAFETY: the handles have as many words; units read and write those below `words`, of each
    // rank, and in all inboxes those of their own number, which is below `MAX_UNITS`. Inboxes stay
    // where `places` has them, and are dropped together, after what writes to them.
    unsafe {
        exchange_kernel::launch_unchecked(
            &inbox.client,
            CubeCount::Static((units as u32).div_ceil(UNITS), 1, 1),
            CubeDim::new_1d(UNITS),
            address_type([x, output]),
            BufferArg::from_raw_parts(x.handle.clone(), words),
            BufferArg::from_raw_parts(output.handle.clone(), all),
            BufferArg::from_raw_parts(inbox.memory.clone(), inbox.words),
            BufferArg::from_raw_parts(inbox.places.clone(), ranks),
            words as u32,
            begin as u32,
            blueprint,
        );
    }
}

fn output(x: &CubeTensor, ranks: usize, combine: Combine) -> CubeTensor {
    let mut shape: Vec<usize> = x.shape().iter().copied().collect();
    if combine == Combine::Gather {
        shape[0] *= ranks;
    }
    burn_cubecl::ops::numeric::empty_device_contiguous_dtype(
        x.client.clone(),
        x.device.clone(),
        Shape::from(shape),
        x.dtype,
    )
}

/// The floats of a dtype; integers are not added.
fn element(dtype: DType) -> Element {
    match dtype {
        DType::F16 => Element::F16,
        DType::BF16 => Element::Bf16,
        _ => Element::F32,
    }
}

pub(super) fn check(devices: &[Device]) -> Result<(), GroupError> {
    let key = key(devices);
    let Some(inboxes) = INBOXES.with_borrow_mut(|inboxes| inboxes.remove(&key)) else {
        return Ok(());
    };
    // For all of them, as the memory of all may be given back.
    inboxes.clients().iter().for_each(wait);
    let mut timed_out = Vec::new();
    for (inbox, device) in inboxes.all.iter().zip(devices) {
        let after = (inbox.words - 1) * WORD;
        let flag = inbox.memory.clone().offset_end(after as u64);
        match inbox.client.read_one(flag) {
            Ok(flag) if flag.iter().all(|byte| *byte == 0) => {}
            Ok(_) => timed_out.push(format!("{device:?}")),
            Err(error) => {
                return Err(GroupError::Lost {
                    device: format!("{device:?}"),
                    reason: error.to_string(),
                });
            }
        }
    }
    if timed_out.is_empty() {
        INBOXES.with_borrow_mut(|all| all.insert(key, inboxes));
        return Ok(());
    }
    Err(GroupError::TimedOut { devices: timed_out })
}
