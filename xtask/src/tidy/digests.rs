//! Digests of the second code generator's kernels must belong to the stock compiler's digests beside them: a
//! change of kernels without a checkout to compile them with would leave them stale.

use ferry_build::{Package, Variant};
use ferry_ptx_tools::{CodeGenerator, DIGESTED, stale_variants};

use super::source::{Complaint, SourceFile};

/// Complaints about stale digests.
pub(super) fn check(files: &[SourceFile]) -> Vec<Complaint> {
    let of = |package: Package, generator: CodeGenerator| {
        let path = generator.digest_file(package);
        files.iter().find(|file| file.path == path)
    };
    let complaint = |package: Package| {
        let stock = of(package, CodeGenerator::Stock)?;
        let nvvm = of(package, CodeGenerator::Nvvm);
        let stale = stale_variants(nvvm.map_or("", |file| &file.text), &stock.text);
        (!stale.is_empty()).then(|| Complaint {
            path: CodeGenerator::Nvvm.digest_file(package).into(),
            line: None,
            text: text(&stale, &stock.path),
        })
    };
    DIGESTED.into_iter().filter_map(complaint).collect()
}

fn text(stale: &[Variant], stock: &str) -> String {
    let stale: Vec<_> = stale.iter().map(Variant::to_string).collect();
    format!(
        "made beside another {stock} ({}): renew it with `{}`, see CONTRIBUTING.md, \"The second code \
         generator\"",
        stale.join(", "),
        CodeGenerator::Nvvm.bless_command()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complaints(files: &[(&str, &str)]) -> Vec<String> {
        let file = |&(path, text): &(&str, &str)| SourceFile {
            path: path.into(),
            text: text.into(),
        };
        let files: Vec<_> = files.iter().map(file).collect();
        check(&files).iter().map(Complaint::to_string).collect()
    }

    #[test]
    fn a_digest_that_was_made_beside_another_is_found_with_the_command_that_renews_it() {
        let stock = (
            "gpu/probes/ptx-digest.txt",
            "\n[sm_90a]\nptx 8.3\n\n[sm_100a]\nptx 8.6\n",
        );
        let found = complaints(&[
            stock,
            ("gpu/probes/nvvm-digest.txt", "\n[sm_90a]\nstock 0\n"),
        ]);
        assert_eq!(
            found,
            [
                "gpu/probes/nvvm-digest.txt: made beside another gpu/probes/ptx-digest.txt (sm_90a, \
                 sm_100a): renew it with `cargo xtask build-ptx --backend nvvm --rust-cuda PATH \
                 --bless`, see CONTRIBUTING.md, \"The second code generator\""
            ]
        );
        assert_eq!(complaints(&[stock]), found, "one that is not there");
        let of_section = |section: &str| {
            let sum = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
            format!("\n[{section}]\nstock {sum}\n")
        };
        // The sum of no bytes.
        let nvvm = ["sm_90a", "sm_100a"].map(of_section).concat();
        assert_eq!(
            complaints(&[("gpu/ptx-digest.txt", ""), ("gpu/nvvm-digest.txt", &nvvm)]),
            [""; 0]
        );
    }
}
