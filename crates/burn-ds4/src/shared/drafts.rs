//! What drafts tokens, and how many.

use clap::{Args, ValueEnum, value_parser};
use ds4_model::generate::MAX_DRAFTS;
use ds4_model::model::Model;

/// What drafts tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Drafter {
    /// The multi-token-prediction layer.
    Mtp,
    /// The DSpark drafter.
    Dspark,
    /// Nothing.
    None,
}

/// Options of drafting. They change no token.
#[derive(Clone, Debug, Args)]
pub struct DraftArgs {
    /// What drafts tokens; the text is the same [default: what the checkpoint has].
    #[arg(long, value_enum)]
    drafter: Option<Drafter>,
    /// Tokens to draft per step, 0 for none [default: 1 for an MTP layer, those of a block for
    /// DSpark].
    #[arg(long, visible_alias = "mtp", value_name = "K")]
    #[arg(value_parser = value_parser!(u8).range(0..=MAX_DRAFTS as i64))]
    draft_tokens: Option<u8>,
    /// Leaves out drafts, from the first that DSpark gives a smaller probability to be accepted.
    #[arg(long, value_name = "TAU", default_value_t = 0.0)]
    pub draft_confidence: f64,
}

impl DraftArgs {
    /// Whether the drafter of a checkpoint is to be loaded.
    pub fn is_wanted(&self) -> bool {
        self.drafter != Some(Drafter::None) && self.draft_tokens != Some(0)
    }

    /// Checks what can be without a model.
    pub fn check(&self) -> Result<(), String> {
        match (self.drafter, self.draft_tokens) {
            (Some(Drafter::None), Some(1..)) => {
                Err("--draft-tokens needs a drafter, not --drafter none".into())
            }
            _ => Ok(()),
        }
    }

    /// Drafts of a step by the drafter of a model, which was loaded if it [is
    /// wanted](Self::is_wanted).
    pub fn drafts(&self, model: &Model) -> Result<usize, String> {
        if !self.is_wanted() {
            return Ok(0);
        }
        let block = model.dspark.as_ref().map(|dspark| dspark.params.block_size);
        let (drafter, most) = match (block, &model.mtp) {
            (Some(block), _) => (Drafter::Dspark, block),
            (None, Some(_)) => (Drafter::Mtp, 1),
            (None, None) => (Drafter::None, 0),
        };
        if let Some(wanted) = self.drafter.filter(|wanted| *wanted != drafter) {
            let [wanted, drafter] = [wanted, drafter].map(name);
            return Err(format!("--drafter {wanted}: the checkpoint has {drafter}"));
        }
        match (self.draft_tokens, drafter) {
            (Some(_), Drafter::None) => {
                Err("--draft-tokens needs a drafter, the checkpoint has none".into())
            }
            (tokens, _) => Ok(tokens.map_or(most, usize::from)),
        }
    }
}

fn name(drafter: Drafter) -> &'static str {
    match drafter {
        Drafter::Mtp => "mtp",
        Drafter::Dspark => "dspark",
        Drafter::None => "none",
    }
}
