//! A conversation in a file.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use serde_json::{Value, json};

use crate::conversation::InputMessage;

/// Writes messages to a new file, in the form that OpenAI's API has for them.
///
/// # Errors
///
/// If the file cannot be written, or is already there.
pub fn save(path: &Path, messages: &[InputMessage]) -> io::Result<()> {
    let messages: Vec<Value> = messages.iter().map(written).collect();
    let text = serde_json::to_string_pretty(&json!({ "messages": messages }))?;
    let mut file = File::create_new(path)?;
    let written = writeln!(file, "{text}");
    if written.is_err() {
        // Half of a conversation is of no use.
        let _ = std::fs::remove_file(path);
    }
    written
}

fn written(message: &InputMessage) -> Value {
    match message {
        InputMessage::System { content, .. } => {
            json!({"role": "system", "content": content.as_str()})
        }
        InputMessage::Assistant {
            content,
            reasoning_content,
            ..
        } => {
            let mut message = json!({"role": "assistant", "content": content});
            if let Some(reasoning) = reasoning_content {
                message["reasoning_content"] = json!(reasoning);
            }
            message
        }
        InputMessage::User { content, .. } | InputMessage::Tool { content, .. } => {
            json!({"role": "user", "content": content.as_str()})
        }
        InputMessage::LatestReminder { content } => json!({"role": "user", "content": content}),
    }
}
