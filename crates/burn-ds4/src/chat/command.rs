//! What somebody says at the prompt of a chat.

use crate::conversation::Effort;

/// What `/help` shows.
pub const HELP: &str = "\
/system TEXT   gives the model instructions; without TEXT, takes them back
/think LEVEL   lets the model think before it answers: low, high, max, or off
/regenerate    answers the last message again, with another seed
/reset         forgets the conversation; the instructions stay
/save FILE     writes the conversation to a new file, as JSON
/stats         shows figures of the last answer and of the conversation
/help          shows this
/exit          ends the chat, as Ctrl-D does
Ctrl-C stops an answer. A message that begins with a slash has two of them.";

/// A line of input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Says this to the model.
    Say(String),
    /// Instructions, if there are to be any.
    System(Option<String>),
    /// How much the model is to think, if it is.
    Think(Option<Effort>),
    Regenerate,
    Reset,
    Save(String),
    Stats,
    Help,
    Exit,
}

impl Command {
    /// Reads a line; nothing for an empty one.
    ///
    /// # Errors
    ///
    /// What is wrong with a command.
    pub fn parse(line: &str) -> Result<Option<Self>, String> {
        let line = line.trim();
        if line.is_empty() {
            return Ok(None);
        }
        let Some(command) = line.strip_prefix('/') else {
            return Ok(Some(Self::Say(line.into())));
        };
        if command.starts_with('/') {
            return Ok(Some(Self::Say(command.into())));
        }
        let (name, rest) = command
            .split_once(char::is_whitespace)
            .unwrap_or((command, ""));
        let rest = rest.trim();
        let alone = |command: Self| match rest {
            "" => Ok(Some(command)),
            _ => Err(format!("/{name} stands alone, found {rest:?}")),
        };
        match name {
            "system" => Ok(Some(Self::System(
                (!rest.is_empty()).then(|| rest.to_owned()),
            ))),
            "think" => Ok(Some(Self::Think(match rest {
                "off" => None,
                "low" => Some(Effort::Low),
                "high" => Some(Effort::High),
                "max" => Some(Effort::Max),
                other => {
                    return Err(format!(
                        "/think is {other:?}, expected low, high, max or off"
                    ));
                }
            }))),
            "save" if rest.is_empty() => Err("/save needs the name of a file".into()),
            "save" => Ok(Some(Self::Save(rest.into()))),
            "regenerate" => alone(Self::Regenerate),
            "reset" => alone(Self::Reset),
            "stats" => alone(Self::Stats),
            "help" => alone(Self::Help),
            "exit" | "quit" => alone(Self::Exit),
            _ => Err(format!("/{name} is no command; /help lists them")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_is_known_by_its_name() {
        let say = |text: &str| Some(Command::Say(text.into()));
        let cases = [
            ("", None),
            ("  \t", None),
            (" Who made the heaven? ", say("Who made the heaven?")),
            ("//etc is a directory", say("/etc is a directory")),
            ("/system", Some(Command::System(None))),
            (
                "/system  Be brief. Always.",
                Some(Command::System(Some("Be brief. Always.".into()))),
            ),
            ("/think off", Some(Command::Think(None))),
            ("/think low", Some(Command::Think(Some(Effort::Low)))),
            ("/think high", Some(Command::Think(Some(Effort::High)))),
            ("/think\tmax", Some(Command::Think(Some(Effort::Max)))),
            ("/regenerate", Some(Command::Regenerate)),
            ("/reset ", Some(Command::Reset)),
            ("/save a b.json", Some(Command::Save("a b.json".into()))),
            ("/stats", Some(Command::Stats)),
            ("/help", Some(Command::Help)),
            ("/exit", Some(Command::Exit)),
            ("/quit", Some(Command::Exit)),
        ];
        for (line, expected) in cases {
            assert_eq!(Command::parse(line), Ok(expected), "{line:?}");
        }
    }

    #[test]
    fn what_is_no_command_is_named() {
        for (line, expected) in [
            ("/thinking", "/thinking is no command; /help lists them"),
            ("/", "/ is no command; /help lists them"),
            ("/think", "/think is \"\", expected low, high, max or off"),
            (
                "/think more",
                "/think is \"more\", expected low, high, max or off",
            ),
            ("/save ", "/save needs the name of a file"),
            ("/reset all", "/reset stands alone, found \"all\""),
        ] {
            assert_eq!(Command::parse(line), Err(expected.into()), "{line:?}");
        }
    }

    #[test]
    fn help_names_every_command() {
        for name in [
            "system",
            "think",
            "regenerate",
            "reset",
            "save",
            "stats",
            "help",
            "exit",
        ] {
            let line = HELP
                .lines()
                .find(|line| line.starts_with(&format!("/{name} ")));
            assert!(line.is_some(), "{name}");
        }
    }
}
