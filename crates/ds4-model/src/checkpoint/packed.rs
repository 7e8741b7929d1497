//! The packed weights of a checkpoint, and what becomes of them.

use std::collections::BTreeMap;

use rayon::prelude::*;
use safetensors::Dtype;

use super::directory::Checkpoint;
use super::format::{StoredLinear, WeightFormat};
use super::loader::Loader;
use super::names;

/// A packed linear weight, its columns, and the format that its stack has on a device.
pub(super) struct PackedLinear<'a>(
    pub(super) StoredLinear<'a>,
    pub(super) usize,
    pub(super) WeightFormat,
);

/// What a device holds in one format: all routed experts of a layer, or one linear; gate and up
/// together.
fn stack_of(prefix: &str) -> String {
    let (owner, part) = prefix.rsplit_once('.').unwrap_or(("", prefix));
    let owner = owner.split_once(".experts.").map_or(owner, |(of, _)| of);
    format!("{owner} {}", if part == "w3" { "w1" } else { part })
}

impl Checkpoint {
    /// How many linear weights there are of each packed format, and of what they become where a
    /// device has them in another one: FP4 of what has scales that are powers of two, of NVFP4 also
    /// alike in pairs, as where it was made of FP4; else dense matrices of the activations' dtype.
    /// The routed experts of a layer become that all together.
    pub fn packed_formats(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for PackedLinear(linear, _, held) in self.packed().values() {
            let becomes = match held {
                WeightFormat::F32 => ", expanded",
                WeightFormat::Fp4 if linear.format != WeightFormat::Fp4 => ", folded to FP4",
                _ => "",
            };
            let format = format!("{}{becomes}", linear.format.name());
            *counts.entry(format).or_default() += 1;
        }
        counts
    }

    /// The packed linear weights, by what their names begin with.
    pub(super) fn packed(&self) -> BTreeMap<&str, PackedLinear<'_>> {
        let located = self.located().into_iter();
        let packed = located.map(|(prefix, linear, inp)| {
            let held = self.held(prefix, &linear);
            (prefix, PackedLinear(linear, inp, held))
        });
        packed.collect()
    }

    /// The format in which a device has a linear weight with its stack: dense if the scales of one
    /// do not fold.
    pub(super) fn held(&self, prefix: &str, linear: &StoredLinear<'_>) -> WeightFormat {
        let stacks = self.stacks.get_or_init(|| {
            let mut stacks: BTreeMap<_, Vec<_>> = BTreeMap::new();
            for (prefix, linear, inp) in self.located() {
                let stack = stacks.entry((stack_of(prefix), linear.format));
                stack.or_default().push((linear, inp));
            }
            let held = |linears: &[(StoredLinear<'_>, usize)]| {
                let mut held = linears.iter().map(|(linear, inp)| linear.held(*inp));
                let first = held.next().unwrap_or(WeightFormat::F32);
                let is_dense = held.any(|held| held == WeightFormat::F32);
                if is_dense { WeightFormat::F32 } else { first }
            };
            let stacks = stacks.into_par_iter();
            stacks.map(|(of, linears)| (of, held(&linears))).collect()
        });
        let held = stacks.get(&(stack_of(prefix), linear.format));
        held.copied().unwrap_or(linear.format)
    }

    fn located(&self) -> Vec<(&str, StoredLinear<'_>, usize)> {
        let mut loader = Loader::quiet(self);
        let found = self.tensors().filter_map(|weight| {
            let prefix = weight.name.strip_suffix(".weight")?;
            self.tensor(&format!("{prefix}.scale"))?;
            if prefix.ends_with(names::ENGRAM_TABLE) {
                return None;
            }
            let &[out, inp] = weight.shape else {
                return None;
            };
            let is_bytes = matches!(weight.dtype, Dtype::I8 | Dtype::U8);
            let inp = if is_bytes { inp.saturating_mul(2) } else { inp };
            Some((prefix, loader.locate(prefix, out, inp)?, inp))
        });
        found.collect()
    }
}
