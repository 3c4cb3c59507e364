"""What a request asks of its tokens, with the tokens in mind that it has already: with speculation as without."""
