//! The packed weights of a checkpoint, and what becomes of them.

use std::collections::BTreeMap;

use safetensors::Dtype;

use super::directory::Checkpoint;
use super::format::{StoredLinear, WeightFormat};
use super::loader::Loader;

/// A packed linear weight, its columns, and the format that its stack has on a device.
pub(super) struct PackedLinear<'a>(
    pub(super) StoredLinear<'a>,
    pub(super) usize,
    pub(super) WeightFormat,
);

impl Checkpoint {
    /// How many linear weights there are of each packed format, and of what they become where a
    /// device has them in another one: FP4 of what has scales that are powers of two, of NVFP4 also
    /// alike in pairs, as where it was made of FP4; else dense matrices of the activations' dtype.
    /// All weights of the routed experts of a layer are judged by the first.
    pub fn packed_formats(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for PackedLinear(linear, _, held) in self.packed(false).values() {
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

    /// The packed linear weights, by what their names begin with. All of a stack of experts are
    /// held like the first, or, where `all` are looked at, dense if the scales of one do not fold.
    pub(super) fn packed(&self, all: bool) -> BTreeMap<&str, PackedLinear<'_>> {
        let mut stacks: BTreeMap<String, WeightFormat> = BTreeMap::new();
        let mut loader = Loader::quiet(self);
        let stack_of = |prefix: &str| match prefix.split_once(".experts.") {
            Some((layer, expert)) => format!("{layer} {}", expert.ends_with("w2")),
            None => prefix.to_owned(),
        };
        let found = self.tensors().filter_map(|weight| {
            let prefix = weight.name.strip_suffix(".weight")?;
            self.tensor(&format!("{prefix}.scale"))?;
            let &[out, inp] = weight.shape else {
                return None;
            };
            let is_bytes = matches!(weight.dtype, Dtype::I8 | Dtype::U8);
            let inp = if is_bytes { inp.saturating_mul(2) } else { inp };
            let linear = loader.locate(prefix, out, inp)?;
            let stack = stacks.entry(stack_of(prefix));
            let stack = stack.or_insert_with(|| linear.held(inp));
            if all && *stack != WeightFormat::F32 {
                *stack = linear.held(inp);
            }
            Some((prefix, (linear, inp)))
        });
        let found: Vec<_> = found.collect();
        let linears = found.into_iter().map(|(prefix, (linear, inp))| {
            (prefix, PackedLinear(linear, inp, stacks[&stack_of(prefix)]))
        });
        linears.collect()
    }
}
