//! Doc comments begin with a noun or a verb: "Number of tokens", "Returns the row", rather than "Of a row".

use super::source::{Complaint, SourceFile};

/// Prepositions, relatives and question words: a comment that begins with one has no head, or hides it.
const NO_HEADS: [&str; 27] = [
    "After", "As", "At", "Before", "Behind", "By", "For", "From", "How", "In", "Like", "Likewise",
    "Of", "On", "That", "Those", "To", "Until", "What", "When", "Where", "Which", "Who", "Whose",
    "Why", "With", "Without",
];

/// Complaints about doc comments that begin with one of [`NO_HEADS`].
pub(super) fn check(file: &SourceFile) -> Vec<Complaint> {
    if !file.is_rust() || file.is_generated() {
        return Vec::new();
    }
    let mut complaints = Vec::new();
    let mut is_inside = false;
    for (index, line) in file.text.lines().enumerate() {
        let text = doc_text(line);
        let first = text.filter(|_| !is_inside).and_then(first_word);
        if let Some(word) = first.filter(|word| NO_HEADS.contains(word)) {
            let text = format!("a doc comment begins with `{word}`, not with a noun or a verb");
            complaints.push(file.complaint_at(index + 1, text));
        }
        is_inside = text.is_some();
    }
    complaints
}

/// Text of a line of a doc comment.
fn doc_text(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let text = line.strip_prefix("///").or(line.strip_prefix("//!"))?;
    (!text.starts_with('/')).then_some(text)
}

/// The word that a text begins with; none if it begins with code, a link or a mark.
fn first_word(text: &str) -> Option<&str> {
    let text = text.trim_start();
    let end = text.find(|character: char| !character.is_alphanumeric());
    let word = &text[..end.unwrap_or(text.len())];
    (!word.is_empty()).then_some(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comment_without_a_head_is_found_once() {
        let text = "##! What this is for.
##! Of many lines.

##/ Of a row.
##/ In words.
fn a() {}
    ##/ Returns what a row holds.
    ##/ Where it ends, `None`.
    fn b() {}
    #### Of no doc comment.
    ##/ `of` code.
    ##/ Offsets are no `Of`.
"
        .replace("##", "//");
        let file = |path: &str| SourceFile {
            path: path.into(),
            text: text.clone(),
        };
        let lines: Vec<_> = check(&file("host/src/plan.rs"))
            .iter()
            .map(|complaint| complaint.line)
            .collect();
        assert_eq!(lines, [1, 4].map(Some));
        assert_eq!(check(&file("nvshmem-sys/src/generated/host.rs")), []);
        assert_eq!(check(&file("README.md")), []);
    }
}
