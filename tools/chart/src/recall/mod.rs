//! The recall of a clustered output head, by the number of clusters that it probes.

mod svg;

use std::fmt::Write;
use std::path::Path;

use serde::Deserialize;

use crate::error::{Error, Location};
pub use svg::draw;

/// The JSON output of the evaluation program, as far as it is shown here.
#[derive(Deserialize)]
struct Evaluation {
    flash_head: Option<Recall>,
}

/// A clustered head on a text.
#[derive(Clone, Debug, Deserialize)]
pub struct Recall {
    /// Clusters of the head.
    pub clusters: u64,
    /// Tokens of a cluster.
    pub capacity: u64,
    /// Positions of the text.
    pub positions: u64,
    /// The share of the dense head's drafts that is accepted, if the model makes drafts.
    pub dense_acceptance: Option<f64>,
    /// Results by the number of probed clusters, ascending.
    pub probes: Vec<Probe>,
}

/// Results of one number of probes, as shares.
#[derive(Clone, Debug, Deserialize)]
pub struct Probe {
    /// Clusters that are probed.
    pub probes: u64,
    /// How often the best token is the dense head's.
    pub recall: f64,
    /// How often a draft is accepted, if the model makes drafts.
    pub acceptance: Option<f64>,
}

impl Recall {
    /// Parses `text`, which was read from `file`.
    ///
    /// # Errors
    /// A text that is no evaluation of a clustered head, or one with impossible figures: shares
    /// outside 0..=1, and numbers of probes that do not ascend or exceed the number of clusters.
    pub fn parse(file: &Path, text: &str) -> Result<Self, Error> {
        let malformed = |line, problem| Error::Malformed {
            location: Location::new(file, line),
            problem,
        };
        let evaluation: Evaluation = serde_json::from_str(text)
            .map_err(|error| malformed(error.line(), error.to_string()))?;
        let recall = evaluation
            .flash_head
            .ok_or_else(|| malformed(1, "no `flash_head`, which --flash-head adds".into()))?;
        recall.check().map_err(|problem| malformed(1, problem))?;
        Ok(recall)
    }

    fn check(&self) -> Result<(), String> {
        if self.probes.is_empty() {
            return Err("`probes` is empty".into());
        }
        let mut least = 1;
        for probe in &self.probes {
            if !(least..=self.clusters).contains(&probe.probes) {
                let expected = format!("{least} to {}", self.clusters);
                return Err(format!("`probes` is {}, expected {expected}", probe.probes));
            }
            least = probe.probes + 1;
        }
        let acceptances = self.probes.iter().map(|probe| probe.acceptance);
        let recalls = self.probes.iter().map(|probe| Some(probe.recall));
        let mut shares = acceptances.chain(recalls).chain([self.dense_acceptance]);
        match shares.find(|share| share.is_some_and(|share| !(0.0..=1.0).contains(&share))) {
            Some(share) => Err(format!("{} is no share", share.unwrap_or_default())),
            None => Ok(()),
        }
    }

    /// A Markdown table with a row for each number of probes.
    pub fn markdown(&self) -> String {
        let mut table = String::from(
            "| clusters probed | of the vocabulary | recall@1 | drafts accepted |\n\
             |---|---|---|---|\n",
        );
        for probe in &self.probes {
            let share = probe.probes as f64 / self.clusters as f64;
            // Writing to a string cannot fail.
            let _ = writeln!(
                table,
                "| {} | {} | {} | {} |",
                probe.probes,
                percent(Some(share)),
                percent(Some(probe.recall)),
                percent(probe.acceptance),
            );
        }
        let dense = percent(self.dense_acceptance);
        let _ = writeln!(table, "| dense head | 100.0 % | 100.0 % | {dense} |");
        table
    }
}

fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "–".into(), |share| format!("{:.1} %", 100.0 * share))
}
