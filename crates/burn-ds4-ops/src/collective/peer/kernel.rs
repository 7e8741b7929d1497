use cubecl::prelude::*;

use crate::collective::Combine;
use crate::intrinsics::{f16_to_f32, pack_bf16, pack_f16};

/// Words that a unit exchanges.
pub(crate) const UNIT_WORDS: u32 = 4;
/// Bytes that these take on their way: each word comes with the number of the exchange.
pub(crate) const UNIT_BYTES: u32 = 8 * UNIT_WORDS;
/// Most units of a launch.
pub(crate) const MAX_UNITS: u32 = 1 << 17;
/// Words of an inbox before those that others write: whether the device has given up, and the
/// number of the last exchange of each unit.
pub(crate) const STATE_WORDS: u32 = MAX_UNITS + UNIT_WORDS;
/// Nanoseconds for which a unit looks for what another device sends. The other one may have kernels
/// of its own to run first.
const PATIENCE: u64 = 10_000_000_000;
/// How often a unit looks before it looks at the clock.
const LOOKS: u32 = 1 << 10;

type Words = Vector<u32, Const<4>>;

/// Floats that are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Element {
    F32,
    F16,
    Bf16,
}

/// How [`exchange_kernel`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ExchangeBlueprint {
    pub rank: u32,
    pub ranks: u32,
    pub combine: Combine,
    /// Of what is added.
    pub element: Element,
}

#[cube]
fn put(at: u64, a: u32, b: u32, number: u32) {
    let at = i64::reinterpret(at);
    let (a, b) = (i32::reinterpret(a), i32::reinterpret(b));
    let number = i32::reinterpret(number);
    gpu_asm!(
        "st.relaxed.sys.global.v4.u32 [{at}], {{{a}, {number}, {b}, {number}}};",
        at = in(_) at, a = in(_) a, b = in(_) b, number = in(_) number
    );
}

#[cube]
fn get(at: u64) -> Words {
    let words: Words;
    let at = i64::reinterpret(at);
    gpu_asm!(
        "ld.relaxed.sys.global.v4.u32 {words}, [{at}];",
        words = out(_) words, at = in(_) at
    );
    words
}

/// Nanoseconds since some time.
#[cube]
fn now() -> u64 {
    let time: i64;
    gpu_asm!("mov.u64 {time}, %globaltimer;", time = out(_) time);
    u64::reinterpret(time)
}

/// Reads the words of a unit of another rank, once they are those of exchange `number`. Returns
/// whether they have come in time.
#[cube]
fn receive(at: u64, number: u32, words: &mut Array<u32>) -> bool {
    let mut looks = 0u32;
    let mut since = 0u64;
    let mut arrived = false;
    let mut waits = true;
    while waits {
        let first = get(at);
        let second = get(at + 16);
        words[0] = first.extract(0usize);
        words[1] = first.extract(2usize);
        words[2] = second.extract(0usize);
        words[3] = second.extract(2usize);
        let numbers = (first.extract(1usize) ^ number)
            | (first.extract(3usize) ^ number)
            | (second.extract(1usize) ^ number)
            | (second.extract(3usize) ^ number);
        arrived = numbers == 0u32;
        waits = !arrived;
        looks += 1u32;
        if waits && looks == LOOKS {
            looks = 0u32;
            let time = now();
            if since == 0u64 {
                since = time;
            }
            waits = time - since < PATIENCE;
        }
    }
    arrived
}

/// Adds the floats in the words of a unit to sums, or begins the sums with them.
#[cube]
// Compile-time values must be accessed by index.
#[allow(clippy::needless_range_loop)]
fn add(
    sums: &mut Array<f32>,
    words: &Array<u32>,
    #[comptime] begins: bool,
    #[comptime] element: Element,
) {
    #[unroll]
    for i in 0..4usize {
        let word = words[i];
        if comptime!(element == Element::F32) {
            add_one(sums, i, f32::reinterpret(word), begins);
        } else if comptime!(element == Element::Bf16) {
            add_one(sums, comptime!(2 * i), f32::reinterpret(word << 16), begins);
            let upper = f32::reinterpret(word & 0xffff_0000u32);
            add_one(sums, comptime!(2 * i + 1), upper, begins);
        } else {
            add_one(sums, comptime!(2 * i), f16_to_f32(word), begins);
            add_one(sums, comptime!(2 * i + 1), f16_to_f32(word >> 16), begins);
        }
    }
}

#[cube]
fn add_one(sums: &mut Array<f32>, #[comptime] i: usize, value: f32, #[comptime] begins: bool) {
    if comptime!(begins) {
        sums[i] = value;
    } else {
        sums[i] += value;
    }
}

/// The words of the sums of a unit.
#[cube]
fn rounded(sums: &Array<f32>, #[comptime] i: usize, #[comptime] element: Element) -> u32 {
    if comptime!(element == Element::F32) {
        u32::reinterpret(sums[i])
    } else if comptime!(element == Element::Bf16) {
        pack_bf16(sums[comptime!(2 * i)], sums[comptime!(2 * i + 1)])
    } else {
        pack_f16(sums[comptime!(2 * i)], sums[comptime!(2 * i + 1)])
    }
}

/// What a device has that has given up: NaN, or 0 where it may be an index.
fn poison(combine: Combine, element: Element) -> u32 {
    match (combine, element) {
        (Combine::Root(_), _) => 0,
        (_, Element::F32) => 0x7fc0_0000,
        (_, Element::F16) => 0x7e00_7e00,
        (_, Element::Bf16) => 0x7fc0_7fc0,
    }
}

/// Sends the words of this rank to all others, waits for theirs and combines them.
///
/// Each unit does this for [`UNIT_WORDS`] of them, by itself. What it sends carries the number of
/// its exchange, so that it needs no fence, and nothing that is late is taken for something newer.
/// There are two places for it, which exchanges use in turn: a rank writes to a place again only
/// after it has received what the others sent in the exchange between, which they do once they have
/// read that place.
///
/// - `x`: words of this rank
/// - `output`: as many, or those of all ranks
/// - `inbox`: [`STATE_WORDS`] words, and those that others write: `[2, ranks, MAX_UNITS]` units
/// - `places`: where the latter begin, on each rank
/// - `words`: in `x`
/// - `begin`: the first word of this launch
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn exchange_kernel(
    x: &[u32],
    output: &mut [u32],
    inbox: &mut [u32],
    places: &[u64],
    words: u32,
    begin: u32,
    #[comptime] blueprint: ExchangeBlueprint,
) {
    let ExchangeBlueprint {
        rank,
        ranks,
        combine,
        element,
    } = comptime!(blueprint);
    let unit = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    let start = begin + unit * UNIT_WORDS;
    if start < words {
        let mut own = Array::<u32>::new(4usize);
        #[unroll]
        for i in 0..4usize {
            let at = start + comptime!(i as u32);
            own[i] = x[min(at, words - 1) as usize];
        }
        let failed = inbox[0] != 0u32;
        let state = (unit + UNIT_WORDS) as usize;
        let number = inbox[state] + 1u32;
        inbox[state] = number;
        let place = (number & 1u32) * ranks;
        if !failed {
            #[unroll]
            for other in 0..ranks {
                if comptime!(other != rank) {
                    let offset = ((place + rank) * MAX_UNITS + unit) * UNIT_BYTES;
                    let at = places[other as usize] + offset as u64;
                    put(at, own[0], own[1], number);
                    put(at + 16u64, own[2], own[3], number);
                }
            }
        }
        let mut complete = !failed;
        let mut arrived = Array::<u32>::new(4usize);
        let mut sums = Array::<f32>::new(8usize);
        let mut combined = Array::<u32>::new(comptime!(4 * ranks as usize));
        #[unroll]
        for other in 0..ranks {
            if comptime!(other == rank) {
                #[unroll]
                for i in 0..4usize {
                    arrived[i] = own[i];
                }
            } else if complete {
                let offset = ((place + other) * MAX_UNITS + unit) * UNIT_BYTES;
                let at = places[rank as usize] + offset as u64;
                complete = receive(at, number, &mut arrived);
            }
            if comptime!(combine == Combine::Sum) {
                add(&mut sums, &arrived, comptime!(other == 0), element);
            } else {
                #[unroll]
                for i in 0..4usize {
                    combined[comptime!(4 * other as usize + i)] = arrived[i];
                }
            }
        }
        if !complete {
            inbox[0] = 1u32;
        }
        let nothing = comptime!(poison(combine, element)).runtime();
        #[unroll]
        for i in 0..4usize {
            let at = start + comptime!(i as u32);
            if at < words {
                if comptime!(combine == Combine::Sum) {
                    let sum = rounded(&sums, i, element);
                    output[at as usize] = select(complete, sum, nothing);
                } else if comptime!(combine == Combine::Gather) {
                    #[unroll]
                    for other in 0..ranks {
                        let word = combined[comptime!(4 * other as usize + i)];
                        let to = other as usize * words as usize + at as usize;
                        output[to] = select(complete, word, nothing);
                    }
                } else {
                    let word = combined[comptime!(4 * root_of(combine) + i)];
                    output[at as usize] = select(complete, word, nothing);
                }
            }
        }
    }
}

/// The rank whose words all ranks take.
fn root_of(combine: Combine) -> usize {
    match combine {
        Combine::Root(root) => root,
        Combine::Sum | Combine::Gather => 0,
    }
}
