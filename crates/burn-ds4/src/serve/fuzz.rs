//! The fuzz target of the bodies of requests, and its test.

use std::sync::{Arc, OnceLock, mpsc};

use ds4_model::config::ModelConfig;
use ds4_model::generate::{GenerateConfig, TextTokenizer};

use crate::conversation::Encoding;
use crate::serve::app::App;
use crate::serve::engine::Loaded;
use crate::serve::options::Options;
use crate::serve::{chat, completions};
use crate::shared::shipped_checkpoint;

/// The server of the shipped checkpoint, without its engine.
pub(crate) fn app() -> &'static App {
    static APP: OnceLock<App> = OnceLock::new();
    APP.get_or_init(new_app)
}

/// A server of its own.
pub(crate) fn new_app() -> App {
    let args = Options {
        name: Some("m".into()),
        ..Options::default()
    };
    let directory = shipped_checkpoint();
    let config = ModelConfig::from_json_file(&directory.join("config.json"));
    let loaded = Loaded {
        tokenizer: TextTokenizer::from_dir(&directory).expect("an asset"),
        config: config.expect("an asset"),
        defaults: GenerateConfig::default(),
        place: args.place.place(),
        drafts: 0,
        encoding: Encoding::V4,
        startup: Arc::default(),
    };
    let (jobs, _) = mpsc::channel();
    App::new(&args, loaded, jobs, Arc::default()).expect("options that suit the model")
}

/// The first byte chooses the endpoint, the rest is the body. A body becomes requests that the
/// engine takes, or an error that is the client's.
pub fn request(data: &[u8]) {
    let Some((endpoint, body)) = data.split_first() else {
        return;
    };
    let prepared = match endpoint % 4 {
        0 => chat::prepare(app(), body),
        1 => completions::prepare(app(), body),
        2 => chat::prepare_response(app(), body),
        _ => chat::prepare_message(app(), body),
    };
    let prepared = prepared.and_then(|prepared| prepared.constrain(app()));
    match prepared {
        Ok(prepared) => {
            assert!(!prepared.requests.is_empty());
            for request in &prepared.requests {
                let valid = request.validate(&app().loaded.config);
                valid.expect("a request is checked");
            }
        }
        Err(error) => {
            assert!(error.status.is_client_error(), "{error:?}");
            assert_eq!(error.response("/").status(), error.status);
        }
    }
}

#[cfg(test)]
#[test]
fn bodies() {
    ds4_fuzz_driver::drive("request", 10_000, request);
}
