//! A conversation in a file.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use ds4_model::generate::Message;
use serde_json::{Value, json};

/// Writes messages to a new file, in the form that OpenAI's API has for them.
///
/// # Errors
///
/// If the file cannot be written, or is already there.
pub fn save(path: &Path, messages: &[Message]) -> io::Result<()> {
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

fn written(message: &Message) -> Value {
    match message {
        Message::System { content, .. } => json!({"role": "system", "content": content}),
        Message::Assistant {
            content,
            reasoning,
            tool_calls,
        } => {
            let mut message = json!({"role": "assistant", "content": content});
            if let Some(reasoning) = reasoning {
                message["reasoning_content"] = json!(reasoning);
            }
            if !tool_calls.is_empty() {
                let calls = tool_calls.iter();
                let calls =
                    calls.map(|call| json!({"name": call.name, "arguments": call.arguments}));
                message["tool_calls"] = calls
                    .map(|function| json!({"type": "function", "function": function}))
                    .collect();
            }
            message
        }
        Message::User { content }
        | Message::Developer { content, .. }
        | Message::ToolResult { content, .. }
        | Message::LatestReminder { content } => json!({"role": "user", "content": content}),
    }
}
