//! Stop strings in a stream of text.

use super::error::GenerateError;

/// What a piece of text lets through.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopStep {
    /// Text that is certain to precede any stop string.
    pub emit: String,
    /// Whether a stop string has been found; nothing is emitted after it.
    pub stopped: bool,
}

/// Finds the first of several stop strings in text that arrives in pieces.
///
/// The emitted text is everything before the stop string that starts earliest, however the text was
/// split into pieces: a suffix that may be the start of a stop string is withheld until it is
/// decided.
///
/// # Example
///
/// ```
/// use ds4_model::generate::StopStrings;
///
/// let mut stops = StopStrings::new(["\n\n"])?;
/// // A line break may be the beginning of a stop string.
/// assert_eq!(stops.push("one\n").emit, "one");
/// assert_eq!(stops.push("two\n").emit, "\ntwo");
/// let last = stops.push("\nthree");
/// assert_eq!((last.emit.as_str(), last.stopped), ("", true));
/// # Ok::<(), ds4_model::generate::GenerateError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    stops: Vec<String>,
    withheld: String,
    stopped: bool,
}

impl StopStrings {
    /// A matcher for these stop strings; with none, all text passes through at once.
    ///
    /// # Errors
    /// [`GenerateError::EmptyStopString`] for a stop string without characters.
    pub fn new<S: Into<String>>(stops: impl IntoIterator<Item = S>) -> Result<Self, GenerateError> {
        let stops: Vec<String> = stops.into_iter().map(Into::into).collect();
        match stops.iter().position(String::is_empty) {
            Some(index) => Err(GenerateError::EmptyStopString { index }),
            None => Ok(Self {
                stops,
                ..Default::default()
            }),
        }
    }

    /// Whether a stop string has been found.
    pub fn stopped(&self) -> bool {
        self.stopped
    }

    /// Takes the next piece of text and returns what can be emitted.
    pub fn push(&mut self, text: &str) -> StopStep {
        if self.stopped {
            return StopStep {
                emit: String::new(),
                stopped: true,
            };
        }
        self.withheld.push_str(text);
        let found = find_first(&self.withheld, &self.stops, false);
        let (at, complete) = found.unwrap_or((self.withheld.len(), false));
        let rest = self.withheld.split_off(at);
        let emit = std::mem::replace(&mut self.withheld, rest);
        if complete {
            self.stopped = true;
            self.withheld.clear();
        }
        StopStep {
            emit,
            stopped: self.stopped,
        }
    }

    /// Ends the text and returns what was withheld, up to a stop string that it may contain.
    pub fn finish(&mut self) -> String {
        let mut rest = std::mem::take(&mut self.withheld);
        if let Some((at, _)) = find_first(&rest, &self.stops, true) {
            rest.truncate(at);
            self.stopped = true;
        }
        rest
    }
}

/// The first place where one of these stop strings stands, and then `true`, or, unless the text has
/// `ended`, may begin to: an earlier start that is still undecided outranks a later string that is
/// already complete.
fn find_first(text: &str, stops: &[String], ended: bool) -> Option<(usize, bool)> {
    let mut places = text.char_indices().filter_map(|(at, _)| {
        let rest = &text[at..];
        let is_complete = stops.iter().any(|stop| rest.starts_with(stop));
        let may_begin = |stop: &String| stop.len() > rest.len() && stop.starts_with(rest);
        let is_open = || !ended && stops.iter().any(may_begin);
        (is_complete || is_open()).then_some((at, is_complete))
    });
    places.next()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Everything that is emitted for these pieces, and whether a stop string ended it.
    fn stream<'a>(stops: &[&str], pieces: impl IntoIterator<Item = &'a str>) -> (String, bool) {
        let mut matcher = StopStrings::new(stops.iter().copied()).unwrap();
        let mut emitted = String::new();
        for piece in pieces {
            emitted += &matcher.push(piece).emit;
        }
        emitted += &matcher.finish();
        (emitted, matcher.stopped())
    }

    fn step(emit: &str, stopped: bool) -> StopStep {
        StopStep {
            emit: emit.into(),
            stopped,
        }
    }

    #[test]
    fn a_possible_start_is_withheld_until_it_is_decided() {
        let mut matcher = StopStrings::new(["\n\nUser:"]).unwrap();
        assert_eq!(matcher.push("Yes.\n"), step("Yes.", false));
        assert_eq!(matcher.push("\nUs"), step("", false));
        assert_eq!(matcher.push("e it"), step("\n\nUse it", false));
        assert_eq!(matcher.push("\n\nUser: no"), step("", true));
        assert_eq!(matcher.push("more"), step("", true));
        assert_eq!(matcher.finish(), "");
    }

    #[test]
    fn without_stop_strings_all_text_passes_at_once() {
        let mut matcher = StopStrings::new::<&str>([]).unwrap();
        assert_eq!(matcher.push("any\n"), step("any\n", false));
        assert_eq!(matcher.finish(), "");
        assert!(!matcher.stopped());
    }

    #[test]
    fn an_unfinished_stop_string_is_flushed_at_the_end() {
        assert_eq!(stream(&["END"], ["the EN"]), ("the EN".into(), false));
    }

    #[test]
    fn the_match_that_starts_first_wins_over_the_one_that_ends_first() {
        assert_eq!(
            stream(&["abcd", "bc"], ["xab", "c", "d"]),
            ("x".into(), true)
        );
        assert_eq!(
            stream(&["abcd", "bc"], ["xab", "c", "e"]),
            ("xa".into(), true)
        );
        assert_eq!(stream(&["abcd", "bc"], ["xabc"]), ("xa".into(), true));
    }

    #[test]
    fn a_match_inside_a_failed_start_is_found() {
        assert_eq!(stream(&["aab"], ["a", "a", "a", "b"]), ("a".into(), true));
    }

    #[test]
    fn characters_of_several_bytes_stay_whole() {
        let mut matcher = StopStrings::new(["」。"]).unwrap();
        assert_eq!(matcher.push("「書」"), step("「書", false));
        assert_eq!(matcher.push("、"), step("」、", false));
        assert_eq!(matcher.push("é」。x"), step("é", true));
    }

    #[test]
    fn an_empty_stop_string_is_an_error() {
        assert!(matches!(
            StopStrings::new(["a", ""]),
            Err(GenerateError::EmptyStopString { index: 1 })
        ));
    }

    proptest! {
        #[test]
        fn any_cut_of_a_text_emits_what_a_search_of_the_whole_text_gives(
            text in "[abé「]{0,24}",
            stops in prop::collection::vec("[abé「]{1,4}", 0..4),
            splits in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        ) {
            let boundaries = text.char_indices().map(|(at, _)| at).chain([text.len()]);
            let boundaries: Vec<usize> = boundaries.collect();
            let splits = splits.iter().map(|split| *split.get(&boundaries));
            let mut splits: Vec<usize> = splits.chain([0, text.len()]).collect();
            splits.sort_unstable();
            let pieces = splits.windows(2).map(|pair| &text[pair[0]..pair[1]]);
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let found = stops.iter().filter_map(|stop| text.find(stop)).min();
            let expected = &text[..found.unwrap_or(text.len())];
            prop_assert_eq!(stream(&stops, pieces), (expected.to_owned(), found.is_some()));
        }

        #[test]
        fn no_more_is_withheld_than_could_become_a_stop_string(
            text in "[abé]{0,24}",
            stops in prop::collection::vec("[abé]{1,4}", 1..4),
        ) {
            let mut matcher = StopStrings::new(stops.clone()).unwrap();
            let (mut received, mut emitted) = (String::new(), String::new());
            for character in text.chars() {
                received.push(character);
                let step = matcher.push(character.encode_utf8(&mut [0; 4]));
                emitted += &step.emit;
                if step.stopped {
                    break;
                }
                let withheld = &received[emitted.len()..];
                let is_start = stops.iter().any(|stop| stop.starts_with(withheld));
                prop_assert!(withheld.is_empty() || is_start);
            }
        }
    }
}
