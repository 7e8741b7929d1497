//! The engine, with what all answers have in common.

use std::error::Error;

use ds4_model::generate::{Engine, EngineConfig, GenerateConfig, GenerateError, Request};
use ds4_model::pipeline::Pipeline;

use crate::generate::answer::{Answer, AnswerText, Finish, Reader, answer};

/// Answers prompts, one after the other.
pub struct Generator<'a> {
    engine: Engine<'a>,
    pipeline: &'a Pipeline,
    config: GenerateConfig,
    /// Most tokens of prompt and answer together, if that is less than the model has space for.
    context: Option<usize>,
}

/// Why there is no answer.
#[derive(Debug)]
pub enum Failure {
    /// The prompt cannot be answered; others can.
    Refused(Box<dyn Error>),
    /// The engine or the reader has failed.
    Lost(Box<dyn Error>),
}

impl From<Failure> for Box<dyn Error> {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Refused(error) | Failure::Lost(error) => error,
        }
    }
}

fn refused(error: GenerateError) -> Failure {
    Failure::Refused(error.into())
}

impl<'a> Generator<'a> {
    /// With an engine of one lane, as `config` and `engine` say, and of a `context` at most.
    pub fn new(
        pipeline: &'a Pipeline,
        config: GenerateConfig,
        context: Option<usize>,
        engine: EngineConfig,
    ) -> Result<Self, GenerateError> {
        let engine = EngineConfig {
            lanes: 1,
            drafts: config.drafts,
            draft_confidence: config.draft_confidence,
            prefill_chunk: config.prefill_chunk,
            graphs: config.graphs,
            context: context.into_iter().chain(engine.context).min(),
            ..engine
        };
        Ok(Self {
            engine: Engine::new(&pipeline.model, engine)?,
            pipeline,
            config,
            context,
        })
    }

    /// The prompt of a conversation.
    #[cfg(feature = "protocols")]
    pub fn encode(
        &self,
        conversation: &crate::conversation::Conversation,
        encoding: crate::conversation::Encoding,
    ) -> Result<Vec<u32>, Failure> {
        let prompt = encoding.encode(conversation, &self.pipeline.tokenizer);
        prompt.map_err(|error| Failure::Refused(error.into()))
    }

    /// Answers a prompt; a conversation says whether the model is to think. Another `attempt` has
    /// another seed.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        thinking: Option<bool>,
        attempt: u64,
        reader: &mut dyn Reader,
    ) -> Result<Answer, Failure> {
        let left = self
            .context
            .map(|context| context.saturating_sub(prompt.len()));
        if left == Some(0) {
            let (tokens, context) = (prompt.len(), self.context.unwrap_or_default());
            let error = format!("the prompt has {tokens} tokens, and --ctx is {context}");
            return Err(Failure::Refused(error.into()));
        }
        let wanted = self.config.max_new_tokens;
        let tokens = left.map_or(wanted, |left| left.min(wanted));
        let mut sampling = self.config.sampling.clone();
        sampling.seed = sampling.seed.wrapping_add(attempt);
        let request = Request {
            sampling,
            stop_tokens: self.config.stop_tokens.clone(),
            ignore_eos: self.config.ignore_eos,
            ..Request::new(prompt, tokens.max(1))
        };
        let stops = &self.config.stop_strings;
        let text = AnswerText::new(&self.pipeline.tokenizer, thinking, stops);
        let text = text.map_err(refused)?;
        if tokens == 0 {
            request
                .validate(self.pipeline.model.config())
                .map_err(refused)?;
            return Ok(Answer::empty(prompt.len()));
        }
        let request = self.engine.add(request).map_err(refused)?;
        let mut answer = answer(&mut self.engine, request, text, reader).map_err(Failure::Lost)?;
        if thinking == Some(true) {
            // Even if there is nothing in it.
            answer.said.reasoning.get_or_insert_default();
        }
        if answer.finish == Finish::Length && tokens < wanted {
            answer.finish = Finish::ContextFull;
        }
        Ok(answer)
    }
}
