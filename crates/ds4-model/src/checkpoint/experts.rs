//! The weights of a layer's experts, stacked.

use std::collections::BTreeMap;

use super::host::{Format, HostExperts, Source};
use super::{InvalidReason, Loader};

impl<'a> Loader<'a> {
    /// `{prefix}.{e}.w1` and `{prefix}.{e}.w3`, `[inter, hidden]` each, as `[experts, 2 * inter, hidden]`: the rows of `w1` (gate), then
    /// those of `w3` (up).
    pub fn experts_gate_up(
        &mut self,
        prefix: &str,
        experts: usize,
        inter: usize,
        hidden: usize,
    ) -> Option<HostExperts> {
        self.stack(prefix, experts, &["w1", "w3"], [inter, hidden])
    }

    /// `{prefix}.{e}.w2`, `[hidden, inter]` each, as `[experts, hidden, inter]`.
    pub fn experts_down(
        &mut self,
        prefix: &str,
        experts: usize,
        hidden: usize,
        inter: usize,
    ) -> Option<HostExperts> {
        self.stack(prefix, experts, &["w2"], [hidden, inter])
    }

    fn stack(
        &mut self,
        prefix: &str,
        experts: usize,
        leaves: &[&str],
        [out, inp]: [usize; 2],
    ) -> Option<HostExperts> {
        let linears = (0..experts).flat_map(|expert| leaves.iter().map(move |leaf| (expert, leaf)));
        let sources: Vec<Source<'a>> = linears
            .filter_map(|(expert, leaf)| {
                self.locate(&format!("{prefix}.{expert}.{leaf}"), out, inp)
            })
            .collect();
        self.check_formats(&sources);
        let stack = self.gather(&sources, [out, inp])?;
        let shape = [experts, leaves.len().saturating_mul(out), inp];
        Some(stack.into_experts(shape, leaves.len()))
    }

    /// Records the experts whose format is not that of most.
    fn check_formats(&mut self, sources: &[Source<'a>]) {
        let mut counts: BTreeMap<Format, usize> = BTreeMap::new();
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
