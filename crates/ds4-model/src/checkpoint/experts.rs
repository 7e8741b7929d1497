//! The weights of a layer's experts, stacked.

use std::collections::{BTreeMap, BTreeSet};

use super::error::{InvalidReason, SHOWN};
use super::format::{StoredLinear, WeightFormat};
use super::host::HostExperts;
use super::loader::Loader;

impl<'a> Loader<'a> {
    /// `{prefix}.{e}.w1` and `{prefix}.{e}.w3`, `[inter, hidden]` each, as
    /// `[experts, 2 * inter, hidden]`: the rows of `w1` (gate), then those of `w3` (up).
    pub fn experts_gate_up(
        &mut self,
        prefix: &str,
        experts: usize,
        inter: usize,
        hidden: usize,
    ) -> Option<HostExperts> {
        self.stack(prefix, Some(experts), &[".w1", ".w3"], [inter, hidden])
    }

    /// `{prefix}.w1` and `{prefix}.w3` of an expert without a number, such as the shared one, as
    /// `[1, 2 * inter, hidden]`.
    pub fn expert_gate_up(
        &mut self,
        prefix: &str,
        inter: usize,
        hidden: usize,
    ) -> Option<HostExperts> {
        self.stack(prefix, None, &[".w1", ".w3"], [inter, hidden])
    }

    /// `{prefix}.{e}.w2`, `[hidden, inter]` each, as `[experts, hidden, inter]`.
    pub fn experts_down(
        &mut self,
        prefix: &str,
        experts: usize,
        hidden: usize,
        inter: usize,
    ) -> Option<HostExperts> {
        self.stack(prefix, Some(experts), &[".w2"], [hidden, inter])
    }

    /// The linears `{prefix}{part}`, or `{prefix}.{e}{part}` with a number of experts, as
    /// `[experts, parts * out, in]`.
    pub(super) fn stack(
        &mut self,
        prefix: &str,
        experts: Option<usize>,
        parts: &[&str],
        shape: [usize; 2],
    ) -> Option<HostExperts> {
        let (matrices, sources) = self.sources(prefix, experts, parts, shape);
        self.stacked(&sources, [matrices, parts.len()], shape)
    }

    /// Stacks weights of `[out, in]`, `parts` in the rows of each matrix.
    pub(super) fn stacked(
        &mut self,
        sources: &[StoredLinear<'a>],
        [matrices, parts]: [usize; 2],
        [out, inp]: [usize; 2],
    ) -> Option<HostExperts> {
        let stack = self.gather(sources, [out, inp])?;
        let shape = [matrices, parts.saturating_mul(out), inp];
        Some(stack.into_experts(shape, parts))
    }

    /// The number of matrices, and the weights of [`stack`](Self::stack), which have one format if
    /// nothing is wrong.
    pub(super) fn sources(
        &mut self,
        prefix: &str,
        experts: Option<usize>,
        parts: &[&str],
        [out, inp]: [usize; 2],
    ) -> (usize, Vec<StoredLinear<'a>>) {
        let prefixes: Vec<String> = match experts {
            Some(experts) => {
                let asked = self.experts_to_ask_for(prefix, experts, parts.len());
                asked.iter().map(|e| format!("{prefix}.{e}")).collect()
            }
            None => vec![prefix.to_owned()],
        };
        let linears = prefixes
            .iter()
            .flat_map(|prefix| parts.iter().map(move |part| format!("{prefix}{part}")));
        let sources: Vec<StoredLinear<'a>> = linears
            .filter_map(|linear| self.locate(&linear, out, inp))
            .collect();
        self.check_formats(&sources);
        (prefixes.len(), sources)
    }

    /// The experts that the checkpoint has any tensor of, and the first of those that it has none
    /// of. The weights of the others, `parts` each, are counted as missing: a configuration can ask
    /// for any number.
    fn experts_to_ask_for(
        &mut self,
        prefix: &str,
        experts: usize,
        parts: usize,
    ) -> BTreeSet<usize> {
        let mut asked = self.checkpoint().numbers_under(prefix);
        asked.split_off(&experts);
        let unknown = (0..experts).filter(|expert| !asked.contains(expert));
        let unknown: Vec<usize> = unknown.take(SHOWN).collect();
        asked.extend(unknown);
        self.count_missing((experts - asked.len()).saturating_mul(parts));
        asked
    }

    /// Records the weights whose format is not the most common one.
    fn check_formats(&mut self, sources: &[StoredLinear<'a>]) {
        let mut counts: BTreeMap<WeightFormat, usize> = BTreeMap::new();
        for source in sources {
            *counts.entry(source.format).or_default() += 1;
        }
        let Some((&common, _)) = counts.iter().max_by_key(|(_, count)| **count) else {
            return;
        };
        for source in sources.iter().filter(|source| source.format != common) {
            let reason = InvalidReason::MixedFormats {
                actual: source.format.name(),
                common: common.name(),
            };
            self.invalid(source.weight.name, reason);
        }
    }
}
