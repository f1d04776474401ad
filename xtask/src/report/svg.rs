//! Pieces of an SVG picture.

/// A picture, from its pieces.
pub(super) struct Svg(String);

impl Svg {
    pub(super) const fn new() -> Self {
        Self(String::new())
    }

    pub(super) fn text(&mut self, x: f64, y: f64, text: &str, style: &str) {
        self.0 += &format!("<text x=\"{x:.1}\" y=\"{y:.1}\" {style}>{text}</text>\n");
    }

    /// A rectangle at x and y, of a width and height.
    pub(super) fn rect(&mut self, at: [f64; 2], size: [f64; 2], colour: &str) {
        let ([x, y], [width, height]) = (at, size);
        self.0 += &format!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" \
             fill=\"{colour}\"/>\n"
        );
    }

    /// A line through points; nothing if there are none.
    pub(super) fn line(&mut self, points: &[[f64; 2]], style: &str) {
        let points = points.iter().map(|[x, y]| format!("{x:.1},{y:.1}"));
        let points = points.collect::<Vec<_>>().join(" ");
        if !points.is_empty() {
            self.0 += &format!("<polyline points=\"{points}\" fill=\"none\" {style}/>\n");
        }
    }

    /// The picture, of a width and height, on white. `ink` is the colour of its texts.
    pub(super) fn finish(self, width: f64, height: f64, ink: &str) -> String {
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
             font-family=\"sans-serif\" font-size=\"12\" fill=\"{ink}\">\n\
             <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n{}</svg>\n",
            self.0
        )
    }
}
